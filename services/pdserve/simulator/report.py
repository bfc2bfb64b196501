"""What a simulation says: latencies with every gap counted, goodput, use of the workers. Times are in seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pdserve.core.slo import Outcome, SloTargets
from pdserve.policy.fleet import Role
from pdserve.simulator.request import Request
from pdserve.simulator.simulation import Simulation
from pdserve.simulator.worker import Worker


def met(request: Request, targets: SloTargets, *, mean_itl: bool = False) -> bool:
    """Whether an answer kept both targets. `mean_itl`: the mean of its gaps is held against the second one instead of
    their percentile (TPOT, as DistServe has it)."""
    if request.outcome is not Outcome.ANSWERED or ttft(request) > targets.ttft:
        return False
    gaps = request.gaps
    if not gaps:
        return True
    return (tpot(request) if mean_itl else percentile(gaps, targets.itl_percentile / 100)) <= targets.itl


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
    """`requests` are those that were answered; `attainment` is the share of all that arrived which met the targets,
    `goodput` how many of them there were a second and worker. `rejected` were turned away for load, `failed` for want
    of workers.

    `hit_rate` is the share of prompt tokens that were not computed at the first try, `fetched_rate` the part of it that
    came from another worker. Per pool: `use` is the busy share of its time, `sending` and `receiving` those of its
    networks, of the busiest worker's in `busiest_link`. `prefill_seconds` is what the prefill pool was busy for each
    answer, `wasted_prefill_seconds` what it computed in all for requests that were rejected after it.
    """

    requests: int
    rejected: int
    failed: int
    seconds: float
    ttft: Spread
    itl: Spread
    attainment: float
    goodput: float
    output_tokens_per_second: float
    hit_rate: float
    fetched_rate: float
    use: dict[str, float]
    sending: dict[str, float]
    receiving: dict[str, float]
    busiest_link: float
    prefill_seconds: float
    wasted_prefill_seconds: float
    transferred_bytes: float
    exposed_seconds: float
    preemptions: int
    replays: int

    @classmethod
    def of(cls, simulation: Simulation, targets: SloTargets, *, mean_itl: bool = False) -> Report:
        """What `simulation`, which ran, came to. `mean_itl` as in `met`."""
        everyone, network = simulation.requests, simulation.network
        requests = [request for request in everyone if request.outcome is Outcome.ANSWERED]
        seconds = max((request.done_at for request in requests), default=0.0)
        kept = sum(met(request, targets, mean_itl=mean_itl) for request in requests)
        workers = list(simulation.workers.values())
        pools = {role.value: [w for w in workers if w.role is role] for role in Role}
        prompts = sum(request.arrival.prompt for request in requests)

        def shares(busy: Callable[[Worker], float]) -> dict[str, float]:
            return {name: sum(map(busy, p)) / len(p) / seconds for name, p in pools.items() if p and seconds}

        def sending(worker: Worker) -> float:
            return network.sent_seconds.get(worker.worker_id, 0.0)

        def receiving(worker: Worker) -> float:
            return network.received_seconds.get(worker.worker_id, 0.0)

        return cls(
            requests=len(requests),
            rejected=sum(request.rejected for request in everyone),
            failed=sum(request.outcome is Outcome.FAILED and not request.rejected for request in everyone),
            seconds=seconds,
            ttft=Spread.of([(ttft(request), 1) for request in requests]),
            itl=Spread.of([gap for request in requests for gap in request.gaps]),
            attainment=_share(kept, len(everyone)),
            goodput=_share(kept, seconds * len(workers)),
            output_tokens_per_second=_share(sum(request.produced for request in requests), seconds),
            hit_rate=_share(sum(request.cached for request in requests), prompts),
            fetched_rate=_share(sum(request.fetched for request in requests), prompts),
            use=shares(lambda worker: worker.busy_seconds),
            sending=shares(sending),
            receiving=shares(receiving),
            busiest_link=_share(max(max(sending(worker), receiving(worker)) for worker in workers), seconds),
            prefill_seconds=_share(sum(w.busy_seconds for w in pools[Role.PREFILL.value]), len(requests)),
            wasted_prefill_seconds=simulation.wasted_prefill_seconds,
            transferred_bytes=network.bytes,
            exposed_seconds=simulation.exposed_seconds,
            preemptions=sum(worker.preemptions for worker in workers),
            replays=sum(max(0, request.tries - 1) for request in everyone),
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


def _share(part: float, whole: float) -> float:
    """NaN of nothing."""
    return part / whole if whole else math.nan
