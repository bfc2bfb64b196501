"""Writes to a stream that its server may have to end with an error."""

from __future__ import annotations

import asyncio
from typing import Any

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
