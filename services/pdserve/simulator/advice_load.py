"""What a load is before anything is simulated: its lengths, what it computes, and who could be served at all."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pdserve.core.errors import ConfigError
from pdserve.core.slo import SloTargets
from pdserve.simulator.cache_study import repeated_tokens
from pdserve.simulator.costs import Chunk, CostModel
from pdserve.simulator.report import Spread
from pdserve.simulator.workload import Arrival

CHUNKS = tuple(1 << power for power in range(5, 14))  # tokens in a step: 32 to 8192


@dataclass(frozen=True, slots=True)
class Load:
    """`rate` in requests a second over `seconds`. `burstiness` is the coefficient of variation of the gaps between
    arrivals (1: Poisson), `repeated` the share of prompt tokens that an endless cache would hold."""

    requests: int
    seconds: float
    rate: float
    burstiness: float
    prompt: Spread
    output: Spread
    repeated: float

    @classmethod
    def of(cls, arrivals: Sequence[Arrival]) -> Load:
        """Of requests in order of arrival. Raises ConfigError where they have no rate."""
        seconds = arrivals[-1].at - arrivals[0].at if arrivals else 0.0
        if seconds <= 0:
            raise ConfigError(f"{len(arrivals)} requests that all arrive at once have no rate to advise on")
        gaps = [later.at - earlier.at for earlier, later in itertools.pairwise(arrivals)]
        return cls(
            requests=len(arrivals),
            seconds=seconds,
            rate=len(gaps) / seconds,
            burstiness=statistics.pstdev(gaps) / statistics.fmean(gaps),
            prompt=Spread.of([(arrival.prompt, 1) for arrival in arrivals]),
            output=Spread.of([(arrival.output, 1) for arrival in arrivals]),
            repeated=sum(repeated_tokens(arrivals)) / sum(arrival.prompt for arrival in arrivals),
        )


@dataclass(frozen=True, slots=True)
class Compute:
    """Seconds of one worker for the mean request: its prompt in full steps, its answer in a batch of `batch` with steps
    of `decode_step` seconds."""

    prefill: float
    decode: float
    batch: int
    decode_step: float

    @property
    def ratio(self) -> float:
        """Prefill to decode."""
        return self.prefill / self.decode if self.decode else float("inf")

    @classmethod
    def of(
        cls, arrivals: Sequence[Arrival], cost: CostModel, itl: float, *, chunk: int, max_seqs: int, kv_tokens: int
    ) -> Compute:
        """Prompts are packed into steps of `chunk` tokens without what an endless cache holds of them. Answers are
        decoded in the largest batch whose steps take `itl` seconds or less and whose KV fits into `kv_tokens`."""
        count = len(arrivals)
        steps = sum(cost.step(chunks, 0, 0) for chunks in _packed(arrivals, chunk))
        tokens = sum(arrival.output - 1 for arrival in arrivals)
        if not tokens:
            return cls(steps / count, 0.0, 0, 0.0)
        # The mean over all decoded tokens of what is there when they are, so long answers count as they hold pages.
        held = sum((arrival.prompt + arrival.output / 2) * (arrival.output - 1) for arrival in arrivals) / tokens
        most = max(1, min(max_seqs, int(kv_tokens / held)))
        batch = most
        if cost.step((), most, round(most * held)) > itl:
            low, high = 1, most
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if cost.step((), middle, round(middle * held)) <= itl else (low, middle)
            batch = low
        step = cost.step((), batch, round(batch * held))
        return cls(steps / count, tokens * step / batch / count, batch, step)


def _packed(arrivals: Sequence[Arrival], budget: int) -> Iterator[list[Chunk]]:
    """What a busy prefill worker computes in its steps: as much of the next prompts as a step takes."""
    step, room = list[Chunk](), budget
    for arrival, held in zip(arrivals, repeated_tokens(arrivals), strict=True):
        done = held
        while done < arrival.prompt:
            count = min(room, arrival.prompt - done)
            step.append((done, count))
            done, room = done + count, room - count
            if not room:
                yield step
                step, room = [], budget
    if step:
        yield step


def within_alone(arrivals: Sequence[Arrival], cost: CostModel, targets: SloTargets, chunk: int) -> float:
    """The share of requests that keep both targets with a worker to themselves, by what steps take: no fleet of such
    workers can serve more of them within the targets."""

    def kept(arrival: Arrival, held: int) -> bool:
        starts = range(held, arrival.prompt, chunk)
        first = sum(cost.step([(at, min(chunk, arrival.prompt - at))], 0, 0) for at in starts)
        # Steps grow with the context, so this is the gap that the percentile is about.
        context = arrival.prompt + round(arrival.output * targets.itl_percentile / 100)
        return first <= targets.ttft and (arrival.output == 1 or cost.step((), 1, context) <= targets.itl)

    pairs = zip(arrivals, repeated_tokens(arrivals), strict=True)
    return _share(kept(arrival, held) for arrival, held in pairs)


def fitting_chunk(arrivals: Sequence[Arrival], cost: CostModel, itl: float, batch: int) -> int:
    """The most tokens of a prompt, as a power of two, that a step may have beside half of `batch` answers and take
    `itl` seconds or less: where the search for the best step of co-located workers begins."""
    middle = sorted(arrival.prompt for arrival in arrivals)[len(arrivals) // 2]
    answers = batch // 2
    sizes = [size for size in CHUNKS if cost.step([(middle, size)], answers, answers * middle) <= itl]
    return max(sizes, default=CHUNKS[0])


def prefill_workers(workers: int, ratio: float) -> int:
    """How many of `workers` would prefill if all were to be equally busy; one of each at least."""
    share = 1.0 if ratio == float("inf") else ratio / (1 + ratio)
    return min(max(1, round(workers * share)), workers - 1)


def _share(kept: Iterable[bool]) -> float:
    every = list(kept)
    return sum(every) / len(every)
