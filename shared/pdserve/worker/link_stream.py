"""One link's control stream: what goes out, what comes in, signs of life, and the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import structlog

from pdserve.core.errors import PdserveError, Unavailable
from pdserve.rpc.convert_link import HEARTBEAT, Beat, control_from_proto, control_to_proto
from pdserve.transfer.messages import ControlMessage
from pdserve.transfer.path import Path
from pdserve.v1 import kv_pb2
from pdserve.worker.messages import LinkProbed

log = structlog.get_logger(__name__)

LEASE = 5.0  # seconds without a sign of life until a peer counts as gone
HEARTBEAT_INTERVAL = LEASE / 5
MAX_OUTBOX = 1 << 16  # control messages; a peer that takes none for a lease is gone anyway

Read = Callable[[], Awaitable[Any]]
Write = Callable[[kv_pb2.LinkMessage], Awaitable[None]]


@dataclass(eq=False, slots=True)
class LinkStream:
    """State of a link from the hellos on."""

    peer: str
    incarnation: str
    epoch: int
    transport: str
    path: Path
    probe: asyncio.Future[LinkProbed] | None = None
    outbox: asyncio.Queue[ControlMessage] = field(default_factory=lambda: asyncio.Queue(MAX_OUTBOX))
    established: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # after its end: out of the books, and told
    reason: str = ""

    @property
    def up(self) -> bool:
        return self.established and not self.ended.is_set()

    def end(self, reason: str) -> None:
        """Ask for the end of both halves. The first reason counts."""
        if not self.ended.is_set():
            self.reason = reason
            self.ended.set()

    async def carry(self, read: Read, write: Write, on_control: Callable[[ControlMessage], None]) -> None:
        """Carry control messages both ways until either side, or either half, ends. `on_control` must not block."""
        tasks = [
            asyncio.create_task(self._receive(read, on_control)),
            asyncio.create_task(self._send(write)),
            asyncio.create_task(self.ended.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.end("the control stream ended")
            if self.probe is not None and not self.probe.done():
                self.probe.set_exception(Unavailable(f"the link to {self.peer} ended: {self.reason}"))
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception) and not isinstance(outcome, _STREAM_ENDS):
                    log.error("link_error", peer=self.peer, epoch=self.epoch, error=repr(outcome))

    async def _receive(self, read: Read, on_control: Callable[[ControlMessage], None]) -> None:
        while True:
            try:
                async with asyncio.timeout(LEASE):
                    item = await read()
            except TimeoutError:
                self.end(f"no sign of life for {LEASE} s")
                return
            if not isinstance(item, kv_pb2.LinkRequest | kv_pb2.LinkResponse):
                self.end("the peer ended the link")
                return
            try:
                control = control_from_proto(item.message)
            except PdserveError as error:
                self.end(str(error))
                return
            if not isinstance(control, Beat) and not self.ended.is_set():
                on_control(control)

    async def _send(self, write: Write) -> None:
        while True:
            message = HEARTBEAT
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_INTERVAL):
                    message = control_to_proto(await self.outbox.get())
            try:
                async with asyncio.timeout(LEASE):
                    await write(message)
            except TimeoutError:
                self.end(f"the peer took no control message for {LEASE} s")
                return


# What reading or writing a stream raises once the peer is gone: no news, since the link ends then anyway.
_STREAM_ENDS = (grpc.aio.AioRpcError, grpc.aio.UsageError, grpc.aio.InternalError, asyncio.InvalidStateError, OSError)
