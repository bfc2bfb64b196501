"""Targets within the test, which answer when they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pdserve.bench.record import Record, Told
from pdserve.bench.target import Facts
from pdserve.core.errors import NoCapacity

FACTS = Facts("tiny", 1000, 500)


class Reciter:
    """Answers at once with the tokens 1, 2, 3, ...; a prompt of `refused` tokens gets no room. Keeps what was asked."""

    def __init__(self, refused: int = 0, facts: Facts = FACTS) -> None:
        self.asked: dict[int, list[int]] = {}
        self._refused, self._facts = refused, facts

    async def facts(self) -> Facts:
        return self._facts

    async def ask(self, prompt: Sequence[int], record: Record) -> None:
        self.asked[record.number] = list(prompt)
        record.sending()
        if len(prompt) == self._refused:
            raise NoCapacity("no room")
        for token in range(1, record.arrival.output + 1):
            record.take(1, [token])
        record.told = Told(len(prompt), record.arrival.output)


class Holding(Reciter):
    """Answers nobody before `crowd` are waiting, or `last` requests have come in all; then all who wait."""

    def __init__(self, crowd: int, last: int) -> None:
        super().__init__()
        self.most, self._crowd, self._last, self._come = 0, crowd, last, 0
        self._waiting = list[asyncio.Event]()

    async def ask(self, prompt: Sequence[int], record: Record) -> None:
        event = asyncio.Event()
        self._waiting.append(event)
        self._come += 1
        self.most = max(self.most, len(self._waiting))
        if len(self._waiting) == self._crowd or self._come == self._last:
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                one.set()
        await event.wait()
        await super().ask(prompt, record)


class Silent(Reciter):
    """Never answers."""

    async def ask(self, prompt: Sequence[int], record: Record) -> None:
        record.sending()
        await asyncio.get_running_loop().create_future()


class Limited(Reciter):
    """Answers every other request while the rate, which `rate` tells, is above `limit`, else all."""

    def __init__(self, limit: float, rate: Callable[[], float]) -> None:
        super().__init__()
        self._limit, self._rate = limit, rate

    async def ask(self, prompt: Sequence[int], record: Record) -> None:
        if self._rate() > self._limit and record.number % 2:
            record.sending()
            raise NoCapacity("no room")
        await super().ask(prompt, record)
