"""A result as one JSON object, and as the rows of tables."""

from __future__ import annotations

from typing import Any

from pdserve.bench.figures import Figures
from pdserve.bench.plan import Measured, Plan, Search
from pdserve.bench.record import Record
from pdserve.bench.target import Facts
from pdserve.core.quantiles import Quantiles
from pdserve.core.slo import SloTargets

VERSION = 1  # of the JSON object
LATENCIES = ("", "mean", "p50", "p90", "p99", "max")
RUNS = ("rate", "attainment", "goodput/s", "TTFT p99", "ITL p99", "errors", "seed", "")
_VERDICTS = {
    "missed_ttft": "first token late",
    "missed_itl": "gaps too long",
    "missed_both": "both",
    "failed": "failed",
}


def result(
    target: str, facts: Facts, salt: str, plan: Plan, run: Measured, search: Search | None = None
) -> dict[str, Any]:
    """The object, without requests. With a `search`, `run` is its best one, or its last where none was good."""
    targets = plan.targets
    slo = {"ttft_ms": 1e3 * targets.ttft, "itl_ms": 1e3 * targets.itl, "percentile": targets.itl_percentile}
    found: dict[str, Any] = {
        "pdserve_bench": VERSION,
        "target": target,
        "model": facts.model,
        "notes": list(facts.notes),
        "load": {**run.load.as_dict(), "seed": run.seed, "warmup": plan.warmup, "salt": salt},
        "slo": slo,
        "client": run.strain.as_dict(),
    }
    if search is not None:
        found["find_rate"] = search.as_dict()
    return (
        {**found, "refused": run.refused}
        if run.refused
        else {**found, "figures": run.figures and run.figures.as_dict()}
    )


def request_row(record: Record) -> dict[str, Any]:
    """One request of a result's file. `at` is seconds from the beginning of the run; all else is in ms or tokens."""
    return {
        "at": record.at,
        "prompt_tokens": record.arrival.prompt,
        "output_tokens": record.output,
        "ttft_ms": None if record.ttft is None else 1e3 * record.ttft,
        "itl_ms": [1e3 * gap for gap in record.gaps],
        "e2e_ms": 1e3 * record.e2e,
        "lateness_ms": None if record.lateness is None else 1e3 * record.lateness,
        "cached_tokens": record.told.cached_tokens if record.told else None,
        "session": record.arrival.session,
        "error": record.error,
    }


def latency_rows(figures: Figures) -> list[tuple[str, ...]]:
    """Cells in ms, in the order of LATENCIES."""
    rows = {
        "time to first token": figures.ttft_ms,
        "between tokens": figures.itl_ms,
        "mean gap of a request": figures.tpot_ms,
        "whole answer": figures.e2e_ms,
        **{f"stage: {name.replace('_', ' ')}": spread for name, spread in figures.stages_ms.items()},
    }
    return [(name, *_cells(spread)) for name, spread in rows.items()]


def figure_rows(figures: Figures, targets: SloTargets) -> list[tuple[str, str]]:
    """What there is beside latencies: a name and a figure."""
    missed = [f"{_VERDICTS[name]}: {count}" for name, count in figures.verdicts.items() if name in _VERDICTS]
    within = f"within {1e3 * targets.ttft:g} ms and {1e3 * targets.itl:g} ms (p{targets.itl_percentile:g} of the gaps)"
    rows = [
        (within, "; ".join([f"{figures.attainment:.1%} of {figures.requests} requests", *missed])),
        ("goodput", f"{figures.goodput:.3f} requests/s{_per(figures)}"),
        ("offered, answered", f"{figures.offered_per_second:.3f} and {figures.answered_per_second:.3f} requests/s"),
        ("output", f"{figures.output_tokens_per_second:,.1f} tokens/s"),
        ("prompts", f"{figures.prompt_tokens_per_second:,.1f} tokens/s"),
    ]
    costs = {
        "GPU-seconds held": figures.gpu_seconds_per_request,
        "core-seconds held": figures.core_seconds_per_request,
        "CPU-seconds used": figures.cpu_seconds_per_request,
    }
    rows += [(f"{name}, a request", f"{value:.3f}") for name, value in costs.items() if value is not None]
    if figures.cached_share is not None:
        rows.append(("prompt tokens cached", f"{figures.cached_share:.1%}"))
    if figures.replays:
        rows.append(("replays", str(figures.replays)))
    if figures.errors:
        rows.append(("errors", ", ".join(f"{code}: {count}" for code, count in figures.errors.items())))
    if figures.assumed_tokens:
        rows.append(("gaps not seen", f"{figures.assumed_tokens} tokens came in chunks that were taken for one token"))
    return rows


def run_rows(search: Search) -> list[tuple[str, ...]]:
    """The runs of a search, in the order of RUNS."""
    rows = list[tuple[str, ...]]()
    for run in search.runs:
        rate = f"{run.load.rate:.3f}"
        if run.figures is None:
            rows.append((rate, "-", "-", "-", "-", "-", str(run.seed), "refused"))
            continue
        figures = run.figures
        errors = str(sum(figures.errors.values()))
        mark = "highest" if run.load.rate == search.state.passed else ""
        latencies = (f"{figures.ttft_ms.p99:.1f} ms", f"{figures.itl_ms.p99:.1f} ms")
        kept = (f"{figures.attainment:.1%}", f"{figures.goodput:.3f}")
        rows.append((rate, *kept, *latencies, errors, str(run.seed), mark))
    return rows


def _cells(spread: Quantiles) -> tuple[str, ...]:
    if not spread.count:
        return ("-",) * (len(LATENCIES) - 1)
    values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.greatest)
    return tuple(f"{value:.1f} ms" for value in values)


def _per(figures: Figures) -> str:
    shares = {"GPU": figures.goodput_per_gpu, "core": figures.goodput_per_core}
    return "".join(f", {share:.3f} for each {name}" for name, share in shares.items() if share is not None)
