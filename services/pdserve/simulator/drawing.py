"""What a plot of a simulation shows: curves and shares as plain numbers. Times are in seconds."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdserve.core.slo import SloTargets
from pdserve.policy.fleet import Role
from pdserve.simulator.report import Report, met, percentile, ttft
from pdserve.simulator.request import Request
from pdserve.simulator.rows import Tenant, tenants
from pdserve.simulator.simulation import Simulation

POINTS = 400  # of a curve; more would not show
WINDOWS = 60  # that time is cut into for shares over time
PERCENTILES = (0.5, 0.9, 0.99)
STAGES = ("waiting for a worker", "prefill and hand-off", "decode")

Curve = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Distribution:
    """`curve` are (value, share of values that are no greater); `percentiles` of PERCENTILES, exactly; `within`, the
    share of values that keep their target."""

    curve: Curve
    percentiles: tuple[float, ...]
    within: float

    @classmethod
    def of(cls, weighted: Sequence[tuple[float, int]], target: float) -> Distribution:
        """Of values with how often each occurs."""
        total = sum(count for _, count in weighted)
        kept = sum(count for value, count in weighted if value <= target)
        exact = tuple(percentile(weighted, share) for share in PERCENTILES) if weighted else ()
        return cls(cdf(weighted), exact, kept / total if total else 0.0)


@dataclass(frozen=True, slots=True)
class Drawing:
    """`ttft` and `itl` count every request that had a token, and every gap.

    `in_flight` is, at each of `times`, how many requests were in each of STAGES. `attainment` is the share that met the
    targets of those that arrived in a window, at its middle; None where nobody did. `busy` is each worker's share of
    the time, by pool, and of its network's busier direction as "links".
    `tenants` as in `rows`.
    """

    title: str
    report: Report
    targets: SloTargets
    ttft: Distribution
    itl: Distribution
    times: list[float]
    in_flight: list[list[int]]
    attainment: list[tuple[float, float | None]]
    busy: dict[str, list[float]]
    tenants: dict[str, Tenant]

    @classmethod
    def of(cls, title: str, simulation: Simulation, report: Report, targets: SloTargets) -> Drawing:
        """Of a simulation that ran."""
        requests = simulation.requests
        first = [request for request in requests if request.first_at >= 0]
        end = max((moment for request in requests for moment in _moments(request)), default=0.0)
        times = [end * index / POINTS for index in range(POINTS + 1)]
        stays = [[stay for request in requests if (stay := _stay(request, stage))] for stage in range(len(STAGES))]
        pools: dict[str, list[float]] = {}
        for role in Role:
            shares = [w.busy_seconds / end for w in simulation.workers.values() if w.role is role and end]
            if shares:
                pools[role.value] = shares
        if simulation.network.bytes:
            sent, received = simulation.network.sent_seconds, simulation.network.received_seconds
            pools["links"] = [max(sent.get(name, 0.0), received.get(name, 0.0)) / end for name in simulation.workers]
        return cls(
            title=title,
            report=report,
            targets=targets,
            ttft=Distribution.of([(ttft(request), 1) for request in first], targets.ttft),
            itl=Distribution.of([gap for request in first for gap in request.gaps], targets.itl),
            times=times,
            in_flight=[population(stay, times) for stay in stays],
            attainment=shares_over_time([(r.arrival.at, met(r, targets)) for r in requests], end, WINDOWS),
            busy=pools,
            tenants=tenants(requests),
        )


def cdf(weighted: Iterable[tuple[float, int]], points: int = POINTS) -> Curve:
    """The share of values that are no greater, at about `points` of them; values come with how often they occur.

    The first point is the least value, with a share of 0; the last is the greatest, with 1.
    """
    ordered = sorted(weighted)
    if not ordered:
        return []
    total = sum(count for _, count in ordered)
    curve, seen, last = [(ordered[0][0], 0.0)], 0, 0.0
    for value, count in ordered:
        seen += count
        if seen / total - last >= 1 / points or seen == total:
            last = seen / total
            curve.append((value, last))
    return curve


def population(stays: Sequence[tuple[float, float]], times: Sequence[float]) -> list[int]:
    """How many of the `stays`, each from a time up to but without another, are on at each of `times`."""
    begins, ends = sorted(begin for begin, _ in stays), sorted(end for _, end in stays)
    return [bisect_right(begins, time) - bisect_right(ends, time) for time in times]


def shares_over_time(
    events: Sequence[tuple[float, bool]], end: float, windows: int
) -> list[tuple[float, float | None]]:
    """Of each of `windows` equal parts of the time up to `end`: its middle, and the share of events that are true; None
    for a part without any."""
    width = end / windows
    if not width:
        return []
    counts, kept = defaultdict[int, int](int), defaultdict[int, int](int)
    for at, good in events:
        window = min(windows - 1, int(at / width))
        counts[window] += 1
        kept[window] += good
    return [
        ((window + 0.5) * width, kept[window] / counts[window] if counts[window] else None) for window in range(windows)
    ]


def _moments(request: Request) -> tuple[float, ...]:
    """When it came into each of STAGES, and when it was through, as far as it got."""
    moments = (request.arrival.at, request.dispatched_at, request.first_at, request.done_at)
    return tuple(moment for moment in moments if moment >= 0)


def _stay(request: Request, stage: int) -> tuple[float, float] | None:
    """From when to when it was in one of STAGES; None where it did not come that far. One that ended before left the
    stage that it was in then."""
    moments = (request.arrival.at, request.dispatched_at, request.first_at)
    if moments[stage] < 0:
        return None
    after = next((moment for moment in (*moments[stage + 1 :], request.done_at) if moment >= 0), None)
    return (moments[stage], after) if after is not None else None
