"""Several answers as one stream: nothing lost, the first failure ends all, and leaving cancels all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from pdserve.client import Event, EventStream, Output
from pdserve.core.errors import Unavailable
from pdserve.gateway.fan import merge


class Source:
    """A stream of outputs, which fails or waits for ever at its end where that is wanted, and knows whether it was
    closed."""

    def __init__(self, texts: list[str], *, fails: bool = False, waits: bool = False) -> None:
        self.closed = False
        self.stream = EventStream(self._events(texts, fails, waits))

    async def _events(self, texts: list[str], fails: bool, waits: bool) -> AsyncGenerator[Event]:
        try:
            for index, text in enumerate(texts):
                yield Output(index, (), text)
                await asyncio.sleep(0)  # others have their turn
            if fails:
                raise Unavailable("lost")
            if waits:
                await asyncio.Event().wait()
        finally:
            self.closed = True


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_every_event_of_every_stream_in_its_order(count: int) -> None:
    sources = [Source([f"{number}-{index}" for index in range(100)]) for number in range(count)]
    found: dict[int, list[str]] = {number: [] for number in range(count)}
    async for number, event in merge([source.stream for source in sources]):
        assert isinstance(event, Output)
        found[number].append(event.text)
    assert found == {number: [f"{number}-{index}" for index in range(100)] for number in range(count)}
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("others", [0, 3])
async def test_the_first_failure_ends_all(others: int) -> None:
    sources = [Source(["a"], fails=True), *(Source(["b"], waits=True) for _ in range(others))]
    seen = []
    with pytest.raises(Unavailable, match="lost"):
        async with asyncio.timeout(10), aclosing(merge([source.stream for source in sources])) as events:
            async for number, _ in events:
                seen.append(number)
    assert sorted(seen) == list(range(others + 1))
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_leaving_closes_all(count: int) -> None:
    sources = [Source(["a"] * 1000, waits=True) for _ in range(count)]
    async with asyncio.timeout(10), aclosing(merge([source.stream for source in sources])) as events:
        await anext(events)
    assert sources[0].closed and all(source.closed for source in sources)


async def test_a_slow_reader_holds_them_up() -> None:
    """What waits for it is bounded, however many answers run."""
    sources = [Source(["a"] * 1000) for _ in range(4)]
    async with aclosing(merge([source.stream for source in sources])) as events:
        await anext(events)
        for _ in range(500):
            await asyncio.sleep(0)  # time for them to run ahead, if nothing held them
        assert not any(source.closed for source in sources)
