"""Sends requests when they are due, or as others are answered, and keeps what came of each."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from pdserve.bench.prompts import Prompts
from pdserve.bench.record import Record
from pdserve.bench.strain import Strain, watch
from pdserve.bench.target import Target, told
from pdserve.core.errors import ConfigError, PdserveError
from pdserve.simulator.workload import Arrival

MOST_TOKENS = 1 << 28  # of prompts that wait to be sent: 1 GiB


@dataclass(frozen=True, slots=True)
class Turn:
    """A request with its number within the run. `prompt` is None where it depends on an answer."""

    number: int
    arrival: Arrival
    prompt: array[int] | None


@dataclass(frozen=True, slots=True)
class Run:
    """Each request that was offered, in order of arrival, and how the client bore it. `seconds` go from the beginning
    until the last answer or error."""

    records: list[Record]
    seconds: float
    strain: Strain


def conversations(arrivals: Sequence[Arrival], prompts: Prompts) -> list[list[Turn]]:
    """The turns of each conversation, in order of their beginnings, with the prompts that are known before.

    Raises ConfigError for more than memory should hold.
    """
    first = {arrival.session: arrival for arrival in reversed(arrivals)}
    tokens = sum(one.prompt for one in arrivals if one.session is None or first[one.session] is one)
    if tokens > MOST_TOKENS:
        raise ConfigError(f"{tokens:,} tokens of prompts are more than {MOST_TOKENS:,}: --requests says how many")
    talks = list[list[Turn]]()
    by_session = dict[int, list[Turn]]()
    for number, arrival in enumerate(arrivals):
        if arrival.session is not None and arrival.session in by_session:
            by_session[arrival.session].append(Turn(number, arrival, None))
            continue
        talk = [Turn(number, arrival, prompts.first(number, arrival))]
        talks.append(talk)
        if arrival.session is not None:
            by_session[arrival.session] = talk
    return talks


class Runner:
    """Runs loads against one target; one at a time. `timeout` is what a request may take, in seconds; `ended` is told
    of each request that has."""

    def __init__(
        self, target: Target, prompts: Prompts, timeout: float, ended: Callable[[Record], None] = lambda _: None
    ) -> None:
        self._target, self._prompts, self._timeout, self._ended = target, prompts, timeout, ended
        self._records: list[Record] = []
        self._start = 0.0

    async def open_loop(self, arrivals: Sequence[Arrival]) -> Run:
        """Each request when it is due. A later turn is due when the one before it was answered, if that is later:
        nobody answers what was not said yet. Its clock starts then."""
        talks = conversations(arrivals, self._prompts)

        async def drive(group: asyncio.TaskGroup) -> None:
            for talk in talks:
                await self._until(talk[0].arrival.at)
                group.create_task(self._converse(talk, paced=True))

        return await self._run(drive)

    async def closed_loop(self, arrivals: Sequence[Arrival], streams: int) -> Run:
        """`streams` requests at any time, until there are no more: who is answered asks the next."""
        waiting = iter(conversations(arrivals, self._prompts))

        async def drive(group: asyncio.TaskGroup) -> None:
            for _ in range(streams):
                group.create_task(self._stream(waiting))

        return await self._run(drive)

    async def _stream(self, waiting: Iterator[list[Turn]]) -> None:
        for talk in waiting:
            await self._converse(talk, paced=False)

    async def _run(self, drive: Callable[[asyncio.TaskGroup], Awaitable[None]]) -> Run:
        self._records = []
        async with watch() as pulse:
            self._start = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                await drive(group)
            seconds = self._clock()
        records = sorted(self._records, key=lambda record: record.number)
        late = [record.lateness for record in records if record.lateness is not None]
        return Run(records, seconds, pulse.strain(late))

    async def _converse(self, talk: list[Turn], *, paced: bool) -> None:
        said, free = array("I"), self._clock()
        for turn in talk:
            prompt = turn.prompt
            at = turn.arrival.at if paced else free
            if prompt is None:
                at = max(at, free)
            await self._until(at)
            if prompt is None:
                prompt = self._prompts.next(turn.number, turn.arrival, said)
            record = await self._ask(turn, prompt, at)
            said, free = prompt + record.ids, record.ended

    async def _ask(self, turn: Turn, prompt: array[int], at: float) -> Record:
        record = Record(turn.number, turn.arrival, at, self._clock)
        self._records.append(record)
        try:
            async with asyncio.timeout(self._timeout):
                await self._target.ask(prompt, record)
        except TimeoutError:
            record.error = f"DEADLINE_EXCEEDED: no whole answer after {self._timeout:g} s"
        except PdserveError as error:
            record.error = told(error)
        record.ended = self._clock()
        record.check()
        self._ended(record)
        return record

    async def _until(self, at: float) -> None:
        while (wait := at - self._clock()) > 0:  # noqa: ASYNC110  timers are coarse, and some early
            await asyncio.sleep(wait)

    def _clock(self) -> float:
        return time.perf_counter() - self._start
