"""Writes to a stream that its server may have to end with an error."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import grpc
import grpc.aio

GRACE = 1.0  # seconds for a write that has begun


async def write_whole(context: grpc.aio.ServicerContext[Any, Any], message: Any) -> None:
    """Write `message`; a cancel waits for a write that has begun, for up to GRACE seconds. grpc takes no status while
    one is on its way: cancelled in its midst, a call could not be told its error any more."""
    writing = asyncio.ensure_future(context.write(message))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait({writing}, timeout=GRACE)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        raise


class PatientContext:
    """A grpc context whose call can be ended in the midst of a write. grpc takes no status meanwhile, and forgets a
    call that it could not give one to: its client would wait for ever. So the status waits for the write, which ends
    when the client reads again, or is gone."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context
        self._writing: asyncio.Future[None] | None = None

    def invocation_metadata(self) -> Any:
        return self._context.invocation_metadata()

    def time_remaining(self) -> float | None:
        return self._context.time_remaining()

    async def write(self, message: Any) -> None:
        """Cancelled, it leaves the write to itself."""
        self._writing = asyncio.ensure_future(self._context.write(message))
        await asyncio.shield(self._writing)

    async def written(self) -> bool:
        """Whether the latest write came through, for who was cancelled in its midst. A client that has its last message
        may leave before the end of its write is heard of here; one that leaves earlier ends the write. Waits for that
        up to GRACE seconds."""
        if self._writing is None:
            return False
        await asyncio.wait({self._writing}, timeout=GRACE)
        return self._writing.done() and not self._writing.cancelled() and self._writing.exception() is None

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        await self._context.abort_with_status(status)
        raise AssertionError("abort_with_status returned")
