"""Multiplex: many requests over one stream. Each is run as a Generate call of its own, with a lane of the shared stream
in the place of its context; whatever the lanes have to say at one time goes out as one message.

A lane's write waits until its item was sent. Meanwhile its request gathers tokens, as it does behind a slow client, so
that messages get larger, not more, when the reader falls behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, cast

import grpc
import grpc.aio
import structlog

from pdserve.core.errors import InvalidRequest
from pdserve.router.tasks import until_first_ends
from pdserve.rpc.errors import DETAILS_KEY, RpcError, to_status
from pdserve.telemetry.tracing import TRACEPARENT
from pdserve.v1 import inference_pb2 as pb

log = structlog.get_logger(__name__)

Generate = Callable[[pb.GenerateRequest, Any], Awaitable[None]]
Send = Callable[[pb.MultiplexResponse], Awaitable[None]]


class _Refused(Exception):
    """How a lane's abort leaves the handler, as grpc's own leaves one. Holds a serialized google.rpc.Status."""

    def __init__(self, status: bytes) -> None:
        super().__init__("refused")
        self.status = status


class Outbox:
    """Items on their way, sent together by `run`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._items: list[pb.MultiplexItem] = []
        self._filled = asyncio.Event()
        self._taken = asyncio.Event()

    async def put(self, item: pb.MultiplexItem) -> None:
        """Returns once the item was sent."""
        self._items.append(item)
        self._filled.set()
        await self._taken.wait()

    async def run(self) -> None:
        """For ever; the owner cancels it."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            items, self._items = self._items, []
            taken, self._taken = self._taken, asyncio.Event()
            await self._send(pb.MultiplexResponse(items=items))
            taken.set()


class Lane:
    """One request's share of the stream: what the Generate handler uses of a grpc context."""

    def __init__(self, number: int, begin: pb.MultiplexBegin, outbox: Outbox) -> None:
        self._number, self._outbox = number, outbox
        self._deadline = time.monotonic() + begin.time_remaining_ms / 1e3 if begin.time_remaining_ms else None
        self._metadata = ((TRACEPARENT, begin.traceparent),) if begin.traceparent else ()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    async def write(self, response: pb.GenerateResponse) -> None:
        await self._outbox.put(pb.MultiplexItem(number=self._number, response=response))

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        raise _Refused(cast("bytes", dict(status.trailing_metadata or ())[DETAILS_KEY]))

    async def fail(self, status: bytes) -> None:
        await self._outbox.put(pb.MultiplexItem(number=self._number, error=status))


class Multiplex:
    """One Multiplex call."""

    def __init__(self, generate: Generate, send: Send) -> None:
        self._generate = generate
        self._outbox = Outbox(send)
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self, requests: AsyncIterator[pb.MultiplexRequest]) -> None:
        """Until the client ends its side and every request has ended. Cancelled, or failing, it cancels them all.

        Raises InvalidRequest for a number that is in use.
        """
        try:
            await until_first_ends(self._outbox.run(), self._serve(requests))
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _serve(self, requests: AsyncIterator[pb.MultiplexRequest]) -> None:
        async for request in requests:
            number = request.number
            if request.HasField("begin"):
                if number in self._tasks:
                    raise InvalidRequest("number", f"request {number} has not ended yet")
                lane = Lane(number, request.begin, self._outbox)
                self._tasks[number] = asyncio.create_task(self._one(number, request.begin.request, lane))
            elif request.HasField("cancel") and number in self._tasks:
                self._tasks[number].cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    async def _one(self, number: int, request: pb.GenerateRequest, lane: Lane) -> None:
        try:
            await self._generate(request, lane)
        except _Refused as refusal:
            await lane.fail(refusal.status)
        except Exception as error:
            log.error("request_broken", error=repr(error), exc_info=error)
            await lane.fail(to_status(RpcError(grpc.StatusCode.INTERNAL, "internal error")).SerializeToString())
        finally:
            self._tasks.pop(number, None)
