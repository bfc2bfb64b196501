"""A router's session with this worker: who it is, what is on its way to it, and the stream's beginning and end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import grpc.aio
import structlog
from google.protobuf.message import Message

from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.rpc.errors import RpcError, abort
from pdserve.rpc.versions import agree
from pdserve.rpc.writing import write_whole
from pdserve.v1 import decode_pb2

log = structlog.get_logger(__name__)

HELLO_DEADLINE = 5.0  # seconds
# A decode step of 256 sequences is about 15 KB: a router may lag a thousand of them behind.
MAX_OUTBOX_BYTES = 16 << 20


class Named(Protocol):
    """The worker that greets."""

    @property
    def worker_id(self) -> str: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def draining(self) -> bool: ...
    def require_open(self) -> None: ...


@dataclass(eq=False, slots=True)
class RouterSession:
    """The outbox is bounded in bytes and never waited for: what does not fit ends the session."""

    router_id: str = ""
    failure: PdserveError | None = None
    closed: bool = False
    _outbox: deque[tuple[Message, int]] = field(default_factory=deque)
    _bytes: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    # Set by `fail`; apart from _news, because a write may be stuck at that time.
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    # Set when the router has heard all that there was to hear, or is gone.
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    # Set while nothing is on its way out.
    flushed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.flushed.set()

    def put(self, response: Message) -> None:
        """Queue a message for the router; none once the session is over. Never waits."""
        if self.closed or self.failure is not None:
            return
        size = response.ByteSize()
        if self._bytes + size > MAX_OUTBOX_BYTES:
            self.fail(RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"the router lags {self._bytes} bytes behind"))
            return
        self._outbox.append((response, size))
        self._bytes += size
        self.flushed.clear()
        self._news.set()

    def fail(self, error: PdserveError) -> None:
        """End the session with `error`, now: what is queued is not sent any more."""
        if self.failure is None:
            self.failure = error
        self._outbox.clear()
        self.flushed.set()
        self.failed.set()

    def close(self) -> None:
        """The stream is over."""
        self.closed = True
        self.settled.set()
        self.flushed.set()

    async def live(self, context: grpc.aio.ServicerContext[Any, Any], reading: Coroutine[Any, Any, None]) -> None:
        """Send what is put until the router ends its side, or `reading` raises. Raises what `fail` was given."""
        tasks = [
            asyncio.create_task(reading),
            asyncio.create_task(self._send_all(context)),
            asyncio.create_task(self.failed.wait()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self.failure is not None:
                raise self.failure
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_all(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """In order, for ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._outbox:
                response, size = self._outbox.popleft()
                await write_whole(context, response)
                self._bytes -= size
            self.flushed.set()


async def attend(
    session: RouterSession,
    context: grpc.aio.ServicerContext[Any, Any],
    kinds: tuple[type[Message], type[Message]],
    worker: Named,
    reading: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    """One session, from its hello to its end; `kinds` are its messages, the router's and ours. Once it is greeted its
    commands are `reading`'s."""
    request, response = kinds
    try:
        worker.require_open()
        welcome = await _greeted(session, context, request, worker)
        session.put(response(welcome=welcome))
        await session.live(context, reading())
    except PdserveError as error:
        # A session that ends because this worker stops is in order.
        tell = log.info if worker.draining else log.warning
        tell("session_failed", router_id=session.router_id, reason=str(error))
        await abort(context, error)


async def _greeted(
    session: RouterSession, context: grpc.aio.ServicerContext[Any, Any], kind: type[Message], worker: Named
) -> decode_pb2.SessionWelcome:
    """The answer to the hello that a session begins with; its messages are of that `kind`. Raises InvalidRequest where
    it begins with something else, and RpcError where no hello comes in time, or no version is common."""
    try:
        async with asyncio.timeout(HELLO_DEADLINE):
            first: Any = await context.read()
    except TimeoutError:
        raise RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, "no hello came") from None
    if not isinstance(first, kind) or first.WhichOneof("command") != "hello":
        raise InvalidRequest("hello", "a session begins with a hello")
    hello = first.hello  # type: ignore[attr-defined]
    version = agree(hello.protocol.min, hello.protocol.max)
    session.router_id = hello.router_id
    return decode_pb2.SessionWelcome(
        protocol_version=version, worker_id=worker.worker_id, incarnation=worker.incarnation
    )
