"""A client that went away ends the work for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`; False when the client went away first, and then it was cancelled and has ended.

    The request's body must have been read: what comes after it is the disconnect.
    """
    running = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
            return True
        return False
    finally:
        for task in (running, leaving):
            task.cancel()
        await asyncio.gather(running, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
