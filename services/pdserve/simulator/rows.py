"""A report as the rows of two tables: latencies, of all and of each tenant, and everything else."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pdserve.core.slo import Outcome, SloTargets
from pdserve.simulator.report import Report, Spread, ttft
from pdserve.simulator.request import Request

LATENCIES = ("", "mean", "p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class Tenant:
    """What one tenant saw: of its answered requests, in seconds."""

    requests: int
    ttft: Spread
    itl: Spread


def tenants(requests: Iterable[Request]) -> dict[str, Tenant]:
    """By name; empty where there are not several."""
    answered = defaultdict[str, list[Request]](list)
    for request in requests:
        if request.outcome is Outcome.ANSWERED:
            answered[request.arrival.tenant].append(request)
    if len(answered) < 2:
        return {}
    return {
        name: Tenant(len(own), Spread.of([(ttft(r), 1) for r in own]), Spread.of([gap for r in own for gap in r.gaps]))
        for name, own in sorted(answered.items())
    }


def latency_rows(report: Report, by_tenant: Mapping[str, Tenant] | None = None) -> list[tuple[str, ...]]:
    """Cells in ms, in the order of LATENCIES: of all, then of each tenant. "-" where there was nothing."""

    def cells(name: str, spread: Spread) -> tuple[str, ...]:
        values = dataclasses.astuple(spread)
        return (name, *("-" if math.isnan(value) else f"{1e3 * value:.1f} ms" for value in values))

    rows = [cells("time to first token", report.ttft), cells("between tokens", report.itl)]
    for name, tenant in (by_tenant or {}).items():
        rows += [cells(f"{name or '(no tenant)'}, first token", tenant.ttft)]
        rows += [cells(f"{name or '(no tenant)'}, between tokens", tenant.itl)]
    return rows


def figure_rows(report: Report, targets: SloTargets) -> list[tuple[str, str]]:
    """What there is beside latencies: a name and a figure."""
    use = ", ".join(f"{role} {share:.0%}" for role, share in report.use.items())
    rows = [
        (f"within {1e3 * targets.ttft:g} ms and {1e3 * targets.itl:g} ms", f"{report.attainment:.1%} of requests"),
        ("goodput", f"{report.goodput:.3f} requests/s for each worker"),
        ("output", f"{report.output_tokens_per_second:,.0f} tokens/s"),
        ("prompt tokens cached", _cached(report)),
        ("busy", use),
        ("KV moved", f"{report.transferred_bytes / 1e9:,.1f} GB"),
    ]
    if report.transferred_bytes:
        exposed = 1e3 * report.exposed_seconds / max(1, report.requests)
        links = ", ".join(f"{role} {share:.1%}" for role, share in _links(report).items())
        rows.append(("hand-off, exposed", f"{exposed:.2f} ms a request"))
        rows.append(("links busy", f"{links}; the busiest {report.busiest_link:.1%}"))
    if report.rejected:
        wasted = f"; {report.wasted_prefill_seconds:.1f} s of prefill were for nothing"
        rows.append(("rejected", f"{report.rejected} requests{wasted if report.wasted_prefill_seconds else ''}"))
    if report.failed:
        rows.append(("failed", f"{report.failed} requests, for want of workers"))
    if report.preemptions or report.replays:
        rows.append(("preempted, replayed", f"{report.preemptions}, {report.replays}"))
    return rows


def _cached(report: Report) -> str:
    fetched = f", {report.fetched_rate:.1%} fetched from other workers" if report.fetched_rate else ""
    return f"{report.hit_rate:.1%}{fetched}"


def _links(report: Report) -> dict[str, float]:
    """Per pool, the direction that is busier."""
    return {role: max(share, report.receiving.get(role, 0.0)) for role, share in report.sending.items()}
