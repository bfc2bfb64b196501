"""A client that went away ends the work for it; one that does not read is left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive, Scope

# The ASGI extension of our server: {"abort": what closes the connection at once}.
HANG_UP = "pdserve.hang_up"


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


async def hang_up(scope: Scope) -> None:
    """Close the connection now, and drop what its client has not read. Other servers close theirs, once what is written
    was read, because the answer is not complete."""
    if extension := scope.get("extensions", {}).get(HANG_UP):
        extension["abort"]()
        await asyncio.sleep(0)  # so that uvicorn knows before the answer returns, and does not call it an error


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
