"""One router's session: what is on its way to it, and the tickets that live in it."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from pdserve.core.errors import PdserveError
from pdserve.core.sequence import EndReason, SequenceSpec
from pdserve.rpc.errors import RpcError
from pdserve.rpc.writing import write_whole
from pdserve.telemetry.tracing import Span
from pdserve.v1 import decode_pb2

# A step of 256 sequences is about 15 KB: a router may lag a thousand of them behind.
MAX_OUTBOX_BYTES = 16 << 20


@dataclass(eq=False, slots=True)
class Ticket:
    """A ticket from Submit until the engine's Ended; `attempt`, `spec` and `peer` are those of its newest attempt.

    Times are wall-clock nanoseconds, 0: not yet.
    """

    id: str
    attempt: int
    spec: SequenceSpec
    peer: str | None
    session: RouterSession
    submitted_ns: int
    reserved_ns: int = 0
    ready_ns: int = 0
    stepping_ns: int = 0  # the beginning of the step that made the first token here
    kv_bytes: int = 0
    tokens: int = 0
    # Open while the prompt is computed here.
    prefill: Span | None = None
    # Why the ticket ends, where this front knows better than the engine that is told to end it.
    verdict: tuple[EndReason, str] | None = None
    # What runs before the engine hears of the ticket: the fetch of a prompt that is computed here.
    preparing: asyncio.Task[None] | None = None


@dataclass(eq=False, slots=True)
class RouterSession:
    """The outbox is bounded in bytes and never waited for: what does not fit ends the session."""

    router_id: str = ""
    failure: PdserveError | None = None
    closed: bool = False
    _outbox: deque[tuple[decode_pb2.SessionResponse, int]] = field(default_factory=deque)
    _bytes: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    # Set by `fail`; apart from _news, because a write may be stuck at that time.
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    # Set when the router has heard all that there was to hear, or is gone.
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, response: decode_pb2.SessionResponse) -> None:
        """Queue a message for the router; none once the session is over. Never waits."""
        if self.closed or self.failure is not None:
            return
        size = response.ByteSize()
        if self._bytes + size > MAX_OUTBOX_BYTES:
            self.fail(RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"the router lags {self._bytes} bytes behind"))
            return
        self._outbox.append((response, size))
        self._bytes += size
        self._news.set()

    def fail(self, error: PdserveError) -> None:
        """End the session with `error`, now: what is queued is not sent any more."""
        if self.failure is None:
            self.failure = error
        self._outbox.clear()
        self.failed.set()

    async def send_all(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Send what is put, in order, for ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._outbox:
                response, size = self._outbox.popleft()
                await write_whole(context, response)
                self._bytes -= size
