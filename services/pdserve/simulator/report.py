"""What a simulation says: latencies with every gap counted, goodput, use of the workers. Times are in seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pdserve.policy.fleet import Role
from pdserve.simulator.simulation import Simulation
from pdserve.simulator.worker import Request


@dataclass(frozen=True, slots=True)
class Slo:
    """A request meets it when its first token comes within `ttft`, and `share` of its gaps are no longer than `itl`.

    `mean_itl`: the mean of its gaps is held against `itl` instead (TPOT, as DistServe has it).
    """

    ttft: float = 0.5
    itl: float = 0.05
    share: float = 0.99
    mean_itl: bool = False

    def met(self, request: Request) -> bool:
        if request.done_at < 0 or ttft(request) > self.ttft:
            return False
        gaps = request.gaps
        if not gaps:
            return True
        return (tpot(request) if self.mean_itl else percentile(gaps, self.share)) <= self.itl


def ttft(request: Request) -> float:
    """From arrival to the first token."""
    return request.first_at - request.arrival.at


def tpot(request: Request) -> float:
    """The mean of a request's gaps; 0 for a single token."""
    count = sum(count for _, count in request.gaps)
    return sum(gap * count for gap, count in request.gaps) / count if count else 0.0


def percentile(weighted: Iterable[tuple[float, int]], share: float) -> float:
    """The value that `share` of all values do not exceed (nearest rank); values come with how often they occur.

    NaN without values.
    """
    ordered = sorted(weighted)
    rank = math.ceil(share * sum(count for _, count in ordered) - 1e-9)
    for value, count in ordered:
        rank -= count
        if rank <= 0:
            return value
    return math.nan


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of a figure."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, weighted: Sequence[tuple[float, int]]) -> Spread:
        count = sum(count for _, count in weighted)
        mean = sum(value * count for value, count in weighted) / count if count else math.nan
        return cls(mean, percentile(weighted, 0.5), percentile(weighted, 0.9), percentile(weighted, 0.99))


@dataclass(frozen=True, slots=True)
class Report:
    """`attainment` is the share of requests that met the SLO, `goodput` how many of them there were a second and
    worker.

    `hit_rate` is the share of prompt tokens that were cached where they were prefilled first; `use` the busy share of
    a pool's time; `prefill_seconds` what the prefill pool was busy for each request.
    """

    requests: int
    seconds: float
    ttft: Spread
    itl: Spread
    attainment: float
    goodput: float
    output_tokens_per_second: float
    hit_rate: float
    use: dict[str, float]
    prefill_seconds: float
    transferred_bytes: float
    exposed_seconds: float
    preemptions: int
    replays: int

    @classmethod
    def of(cls, simulation: Simulation, slo: Slo) -> Report:
        requests = [request for request in simulation.requests if request.done_at >= 0]
        seconds = max((request.done_at for request in requests), default=0.0)
        met = sum(slo.met(request) for request in requests)
        pools = {role: [w for w in simulation.workers.values() if w.role is role] for role in Role}
        prompts = sum(request.arrival.prompt for request in requests)
        return cls(
            requests=len(requests),
            seconds=seconds,
            ttft=Spread.of([(ttft(request), 1) for request in requests]),
            itl=Spread.of([gap for request in requests for gap in request.gaps]),
            attainment=met / len(requests) if requests else math.nan,
            goodput=met / seconds / len(simulation.workers) if seconds else math.nan,
            output_tokens_per_second=sum(request.produced for request in requests) / seconds if seconds else math.nan,
            hit_rate=sum(request.cached for request in requests) / prompts if prompts else math.nan,
            use={
                role.value: sum(worker.busy_seconds for worker in pool) / len(pool) / seconds
                for role, pool in pools.items()
                if pool and seconds
            },
            prefill_seconds=sum(w.busy_seconds for w in pools[Role.PREFILL]) / len(requests) if requests else math.nan,
            transferred_bytes=simulation.transferred_bytes,
            exposed_seconds=simulation.exposed_seconds,
            preemptions=sum(worker.preemptions for worker in simulation.workers.values()),
            replays=sum(max(0, request.tries - 1) for request in requests),
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def highest_rate(attainment: Callable[[float], float], goal: float, low: float, high: float, steps: int = 12) -> float:
    """The highest rate between `low` and `high` at which `attainment(rate)` is `goal` or more, by bisection.

    Attainment must not rise with the rate. `low` where even that misses it, `high` where nothing does.
    """
    if attainment(high) >= goal:
        return high
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if attainment(middle) >= goal else (low, middle)
    return low
