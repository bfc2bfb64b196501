"""Disaggregate or not: co-located workers at their best against prefill and decode workers at theirs.

Both have the same number of workers and are judged by goodput: the highest rate at which enough requests keep both
targets. A rate is had by replaying the load so many times as fast. That fewer requests keep their targets at a higher
rate is taken for granted, so rates are searched for by halving.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pdserve.simulator.advice_load import CHUNKS, Compute, Load, fitting_chunk, prefill_workers, within_alone
from pdserve.simulator.advice_search import higher, highest, smallest
from pdserve.simulator.advice_trials import Candidate, Trials
from pdserve.simulator.advice_verdict import SMALLEST_SPLIT, Side, Verdict, decide, impossible
from pdserve.simulator.plan import FleetPlan
from pdserve.simulator.workload import Arrival

PREFILL_CHUNKS = (2048, 8192)
TOLERANCE = 0.02  # of a goodput
BUSY = 0.6  # the share of its time that a worker is guessed to be busy at its goodput
# A load lasts so many times the target for the first token, so that a queue that grows by a tenth of the time is seen,
# and so many times as long as an answer takes, so that a batch is as large as it gets for most of it.
QUEUES, ANSWERS = 10, 5
MOST_WORKERS = 64  # that are tried where nobody said how many there are


@dataclass(frozen=True, slots=True)
class Question:
    """`workers` in all (None: as many as the load needs, see `advise`), `goal` the share of requests that
    have to keep both targets, `margin` the gain up to which it is a tie."""

    workers: int | None = None
    goal: float = 0.9
    margin: float = 0.1


@dataclass(frozen=True, slots=True)
class Tried:
    """A fleet, and its goodput; `exact` is false where it was only found to be no more than that."""

    candidate: Candidate
    goodput: float
    exact: bool


@dataclass(frozen=True, slots=True)
class Advice:
    """`alone` is the share of requests that keep the targets on an idle worker. Both sides are None, and nothing was
    tried, where that is not enough."""

    load: Load
    compute: Compute
    alone: float
    workers: int
    colocated: Side | None
    split: Side | None
    tried: tuple[Tried, ...]
    simulations: int
    verdict: Verdict


def advise(
    plan: FleetPlan, arrivals: Sequence[Arrival], question: Question, made: Callable[[int], None] = lambda count: None
) -> Advice:
    """Compare fleets of the workers of `plan`, whose targets are what requests ask for, under `arrivals`.

    Fleets are as large as `question` says, else as the smallest co-located one that serves the load as it is, two
    workers at least; where MOST_WORKERS are not enough, as the smallest disaggregated one that is.

    `made` is told how many simulations there were, after each. Raises ConfigError for a load without a rate, and
    InvalidRequest for a request that no worker could ever take.
    """
    assert plan.targets is not None
    load, limits = Load.of(arrivals), plan.decode_limits
    compute = Compute.of(
        arrivals,
        plan.cost,
        plan.targets.itl,
        chunk=PREFILL_CHUNKS[0],
        max_seqs=limits.max_num_seqs,
        kv_tokens=limits.total_blocks * plan.layout.block_size,
    )
    alone = within_alone(arrivals, plan.cost, plan.targets, max(PREFILL_CHUNKS))
    if alone < question.goal:
        workers = question.workers or SMALLEST_SPLIT
        return Advice(load, compute, alone, workers, None, None, (), 0, impossible(alone, question.goal))
    answer = load.output.mean * compute.decode_step
    seconds = max(QUEUES * plan.targets.ttft, ANSWERS * answer)
    trials = Trials(plan, arrivals, load.rate, question.goal, seconds, made)
    chunk = fitting_chunk(arrivals, plan.cost, plan.targets.itl, compute.batch)
    search = _Search(trials, load.rate, compute, chunk)
    workers = question.workers or search.enough()
    colocated = search.colocated(workers)
    split = search.split(workers, colocated)
    one, two = search.side(colocated), search.side(split)
    verdict = decide(one, two, load.rate, question.margin)
    return Advice(load, compute, alone, workers, one, two, tuple(search.tried.values()), trials.simulations, verdict)


def _split(workers: int, ratio: float, chunk: int) -> Candidate:
    """Pools as large as their parts of the work."""
    prefill = prefill_workers(workers, ratio)
    return Candidate(chunk, prefill=prefill, decode=workers - prefill, prefill_chunk=PREFILL_CHUNKS[0])


def _either(candidate: Candidate) -> list[Candidate]:
    return [replace(candidate, conditional=conditional) for conditional in (True, False)]


def _ratios(candidate: Candidate) -> list[Candidate]:
    """One worker more in one pool, and one less in the other."""
    prefill, decode = candidate.prefill, candidate.decode
    pools = [(prefill + moved, decode - moved) for moved in (-1, 1)]
    moved = [replace(candidate, prefill=p, decode=d) for p, d in pools if p and d]
    return [other for neighbour in moved for other in _either(neighbour)]


def _steps(candidate: Candidate) -> list[Candidate]:
    """Longer and shorter steps, and the other answer to where prompts may be computed."""
    found = [replace(candidate, prefill_chunk=size) for size in PREFILL_CHUNKS]
    found.append(replace(candidate, conditional=not candidate.conditional))
    if candidate.conditional:
        found += _chunks(candidate)
    return [other for other in found if other != candidate]


def _chunks(candidate: Candidate) -> list[Candidate]:
    sizes = (candidate.chunk // 2, candidate.chunk * 2)
    return [replace(candidate, chunk=size) for size in sizes if size in CHUNKS]


class _Search:
    """What was tried, and what is looked for next."""

    def __init__(self, trials: Trials, rate: float, compute: Compute, chunk: int) -> None:
        """`chunk` is the step to begin with."""
        self.tried: dict[Candidate, Tried] = {}
        self._trials, self._rate, self._compute = trials, rate, compute
        self._chunk = chunk
        self._guess = math.ceil(rate * (compute.prefill + compute.decode) / BUSY)

    def enough(self) -> int:
        """How large a fleet the load as it is needs, see `advise`."""
        needed = self._colocated_needed(self._guess)
        if needed is None:
            ratio = self._compute.ratio
            needed = self._smallest(
                lambda workers: _either(_split(workers, ratio, self._chunk)), self._guess, SMALLEST_SPLIT
            )
        return max(SMALLEST_SPLIT, needed or min(self._guess, MOST_WORKERS))

    def colocated(self, workers: int) -> Tried:
        """The best of so many: the step that fits the targets and those around it, then from the best of them on; and
        at last the router's own choice instead of least work."""
        best = self._best(self._colocated(workers))
        while (found := self._best(_chunks(best.candidate), best)) is not best:
            best = found
        return self._best([replace(best.candidate, balanced=False)], best)

    def _colocated(self, workers: int) -> list[Candidate]:
        place = CHUNKS.index(self._chunk)
        sizes = [self._chunk, *(CHUNKS[near] for near in (place - 1, place + 1, place - 2) if 0 <= near < len(CHUNKS))]
        return [Candidate(size, colocated=workers, balanced=True) for size in dict.fromkeys([*sizes, CHUNKS[-1]])]

    def split(self, workers: int, colocated: Tried) -> Tried:
        """The best of so many: from the ratio of the work to its neighbours, then to other steps there, and again until
        neither is better. Steps of decode workers, which prefill some prompts, begin with the best co-located ones."""
        best = self._best(_either(_split(workers, self._compute.ratio, colocated.candidate.chunk)))
        while True:
            before = best
            for around in (_ratios, _steps):
                while (found := self._best(around(best.candidate), best)) is not best:
                    best = found
            if best is before:
                return best

    def side(self, found: Tried) -> Side:
        """What the best of its kind means for the load as it is."""
        candidate, rate = found.candidate, self._rate
        guess = math.ceil(candidate.workers * rate / found.goodput) if found.goodput else MOST_WORKERS
        if candidate.colocated:
            needed = self._colocated_needed(guess)
        else:
            needed = self._smallest(lambda workers: self._resized(candidate, workers), guess, SMALLEST_SPLIT)
        return Side(candidate, found.goodput, self._trials.report(candidate, rate).attainment, needed)

    def _colocated_needed(self, guess: int) -> int | None:
        return self._smallest(self._colocated, guess, 1)

    def _resized(self, candidate: Candidate, workers: int) -> list[Candidate]:
        """The fleet's ratio with another number of workers, and what is next to it."""
        near = workers * candidate.prefill / candidate.workers
        counts = {min(max(1, count), workers - 1) for count in (round(near), math.floor(near), math.ceil(near))}
        return [replace(candidate, prefill=count, decode=workers - count) for count in sorted(counts)]

    def _smallest(self, fleets: Callable[[int], Sequence[Candidate]], guess: int, least: int) -> int | None:
        def enough(workers: int) -> bool:
            return any(self._trials.serves(candidate, self._rate) for candidate in fleets(workers))

        return smallest(enough, guess, MOST_WORKERS, least)

    def _best(self, candidates: Sequence[Candidate], best: Tried | None = None) -> Tried:
        """Of `candidates` and of `best`. All but the first are asked first whether they are better at all."""
        for candidate in candidates:
            if candidate in self.tried:
                continue  # it is `best`, or was no better than one before
            serves = partial(self._trials.serves, candidate)
            if best is None or not best.goodput:
                guess = BUSY * candidate.workers / (self._compute.prefill + self._compute.decode)
                found = Tried(candidate, highest(serves, guess, TOLERANCE), True)
            else:
                more = higher(serves, best.goodput, TOLERANCE)
                found = Tried(candidate, best.goodput if more is None else more, more is not None)
            self.tried[candidate] = found
            if best is None or found.goodput > best.goodput:
                best = found
        assert best is not None
        return best
