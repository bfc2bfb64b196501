"""Multiplex: many requests over one stream. Each is run as a Generate call of its own, with a lane of the shared stream
in the place of its context; whatever the lanes have to say at one time goes out as one message.

A lane's write waits until its item was sent. Meanwhile its request gathers tokens, as it does behind a slow client, so
that messages get larger, not more, when the reader falls behind. What waits is bounded: an item for each lane and one
refusal, and there are no more than MAX_LANES.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, cast

import grpc
import grpc.aio
import structlog

from pdserve.core.errors import InvalidRequest, NoCapacity
from pdserve.router.tasks import until_first_ends
from pdserve.rpc.api_keys import AUTHORIZATION
from pdserve.rpc.errors import DETAILS_KEY, RpcError, to_status
from pdserve.rpc.tenant import TENANT
from pdserve.telemetry.tracing import TRACEPARENT, bounded_traceparent
from pdserve.v1 import inference_pb2 as pb

log = structlog.get_logger(__name__)

# Requests at a time on one stream; the API names it. One more is refused: a peer that begins requests and never reads
# would have the router hold all of them.
MAX_LANES = 4096
_RETRY_AFTER = 1.0  # seconds that a refused one is told to wait

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
        self._items: dict[int, pb.MultiplexItem] = {}  # by the id of each, in order
        self._filled = asyncio.Event()
        self._taken = asyncio.Event()

    async def put(self, item: pb.MultiplexItem) -> None:
        """Returns once the item was sent. Cancelled before it is on its way, it takes the item back."""
        self._items[id(item)] = item
        self._filled.set()
        try:
            await self._taken.wait()
        except asyncio.CancelledError:
            self._items.pop(id(item), None)
            raise

    async def run(self) -> None:
        """For ever; the owner cancels it."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            if not self._items:
                continue  # all were taken back
            items, self._items = self._items, {}
            taken, self._taken = self._taken, asyncio.Event()
            await self._send(pb.MultiplexResponse(items=items.values()))
            taken.set()


class Lane:
    """One request's share of the stream: what the Generate handler uses of a grpc context."""

    def __init__(self, number: int, begin: pb.MultiplexBegin, outbox: Outbox, key: str = "") -> None:
        """`key` is the stream's, for a request that shows none."""
        self._number, self._outbox = number, outbox
        self._deadline = time.monotonic() + begin.time_remaining_ms / 1e3 if begin.time_remaining_ms else None
        parent = bounded_traceparent(begin.traceparent)
        shown = begin.api_key or key
        named = (
            *((TRACEPARENT, parent), (TENANT, begin.tenant_id)),
            (AUTHORIZATION, f"Bearer {shown}" if shown else ""),
        )
        self._metadata = tuple((key, value) for key, value in named if value)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    async def write(self, response: pb.GenerateResponse) -> None:
        await self._outbox.put(pb.MultiplexItem(number=self._number, response=response))

    async def written(self) -> bool:
        """No: a cancel is sent by who has not seen the finish."""
        return False

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        raise _Refused(cast("bytes", dict(status.trailing_metadata or ())[DETAILS_KEY]))

    async def fail(self, status: bytes) -> None:
        await self._outbox.put(_failure(self._number, status))


class Multiplex:
    """One Multiplex call, for `max_lanes` requests at a time. `key` is the API key that the call itself shows."""

    def __init__(self, generate: Generate, send: Send, key: str = "", max_lanes: int = MAX_LANES) -> None:
        self._generate, self._key, self._max_lanes = generate, key, max_lanes
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
                if len(self._tasks) >= self._max_lanes:
                    await self._refuse(number)
                else:
                    self._begin(number, request.begin)
            elif request.HasField("cancel") and number in self._tasks:
                self._tasks[number].cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    def _begin(self, number: int, begin: pb.MultiplexBegin) -> None:
        task = asyncio.create_task(self._one(begin.request, Lane(number, begin, self._outbox, self._key)))
        self._tasks[number] = task
        # Not at the end of the task's own code: one that is cancelled in the tick of its beginning never runs any.
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _refuse(self, number: int) -> None:
        """Say that there is no room. Nothing more is read until that was sent, so one such answer waits at most."""
        error = NoCapacity(f"this stream has {self._max_lanes} requests already", _RETRY_AFTER)
        await self._outbox.put(_failure(number, to_status(error).SerializeToString()))

    async def _one(self, request: pb.GenerateRequest, lane: Lane) -> None:
        try:
            await self._generate(request, lane)
        except _Refused as refusal:
            await lane.fail(refusal.status)
        except Exception as error:
            log.error("request_broken", error=repr(error), exc_info=error)
            await lane.fail(to_status(RpcError(grpc.StatusCode.INTERNAL, "internal error")).SerializeToString())


def _failure(number: int, status: bytes) -> pb.MultiplexItem:
    return pb.MultiplexItem(number=number, error=status)
