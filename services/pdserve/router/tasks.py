"""Tasks that live and end together, inside one that goes on.

Not asyncio.TaskGroup: Python 3.11's cancels its parent to wake it and does not take that back, and a cancel from
outside that comes while children fail is lost. A task that runs for ever and reconnects would then never end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pdserve.core.errors import Unavailable

T = TypeVar("T")


async def until_first_ends(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until one ends, then cancel the others and wait for them. Raises what ended it.

    A cancel from outside cancels all and always comes through. One that ends as cancelled without it (grpc does that to
    readers of a call that was cancelled locally) counts as Unavailable, not as a cancel of the caller.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        if task.cancelled():
            raise Unavailable("the call was cancelled")
        task.result()


@asynccontextmanager
async def meanwhile(work: Awaitable[T]) -> AsyncIterator[asyncio.Future[T]]:
    """A scope in which `work` goes on; leaving waits for its end, or ends it where the scope is cancelled."""
    future = asyncio.ensure_future(work)
    try:
        yield future
        await future
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError):
            future.cancel()
        await asyncio.gather(future, return_exceptions=True)
        raise
