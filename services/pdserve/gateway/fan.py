"""Several answers at once as one stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from pdserve.client import Event, EventStream

Item = tuple[int, Event]
_AHEAD = 64  # events that may wait for a slow reader, over all answers


async def merge(streams: Sequence[EventStream]) -> AsyncGenerator[Item]:
    """Events with the number of their stream, as they come. The first failure ends all; closing this cancels all."""
    if len(streams) == 1:
        async with streams[0] as stream:
            async for event in stream:
                yield 0, event
        return
    queue: asyncio.Queue[Item | Exception | None] = asyncio.Queue(_AHEAD)

    async def pump(index: int, stream: EventStream) -> None:
        try:
            async with stream:
                async for event in stream:
                    await queue.put((index, event))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
