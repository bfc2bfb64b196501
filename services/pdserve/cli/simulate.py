"""`pdserve simulate`: a fleet under a virtual clock, driven by the router's own policies."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.console import fail, show_table
from pdserve.core.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from pdserve.simulator.report import Report, Spread


def simulate(
    plan: Annotated[Path, typer.Argument(help="YAML file: fleet, workload, model, cost, policy, slo, seed.")],
    change: Annotated[
        list[str], typer.Option("--set", help="KEY=VALUE over the file's, such as fleet.prefill=4. Repeat for more.")
    ] = [],  # noqa: B006  nobody changes it
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Simulate a fleet, and say what its users would see. Same file, same result, to the bit.

    Traces are read as published: Mooncake's JSONL, Azure's CSV, vidur's CSV.
    """
    from pdserve.simulator.config import SimulationSettings, parse_changes
    from pdserve.simulator.report import Report
    from pdserve.simulator.simulation import Simulation

    try:
        settings = SimulationSettings.load(plan, parse_changes(change))
        simulation = Simulation(settings.plan(), settings.routing())
        began = time.perf_counter()
        simulation.run(settings.arrivals())
    except ConfigError as error:
        fail(str(error), code=2)
    except InvalidRequest as error:
        fail(f"a request can never be served: {error}")
    report, took = Report.of(simulation, settings.targets()), time.perf_counter() - began
    if as_json:
        typer.echo(json.dumps({**report.as_dict(), "simulation_seconds": took}))
        return
    show_table("", ("", "mean", "p50", "p90", "p99"), latency_rows(report), numbers=range(1, 5))
    show_table("", ("", ""), figure_rows(report, settings.slo.ttft_ms, settings.slo.itl_ms), numbers=())
    typer.echo(f"{report.requests} requests, {report.seconds:.0f} s simulated in {took:.1f} s", err=True)


def latency_rows(report: Report) -> list[tuple[str, ...]]:
    """Cells in ms."""

    def cells(name: str, spread: Spread) -> tuple[str, ...]:
        return (name, *(f"{1e3 * value:.1f} ms" for value in dataclasses.astuple(spread)))

    return [cells("time to first token", report.ttft), cells("between tokens", report.itl)]


def figure_rows(report: Report, ttft_ms: float, itl_ms: float) -> list[tuple[str, str]]:
    """What there is beside latencies."""
    use = ", ".join(f"{role} {share:.0%}" for role, share in report.use.items())
    rows = [
        (f"within {ttft_ms:g} ms and {itl_ms:g} ms", f"{report.attainment:.1%} of requests"),
        ("goodput", f"{report.goodput:.3f} requests/s for each worker"),
        ("output", f"{report.output_tokens_per_second:,.0f} tokens/s"),
        ("prompt tokens cached", f"{report.hit_rate:.1%}"),
        ("busy", use),
        ("KV moved", f"{report.transferred_bytes / 1e9:,.1f} GB"),
    ]
    if report.transferred_bytes:
        rows.append(("hand-off, exposed", f"{1e3 * report.exposed_seconds / report.requests:.2f} ms a request"))
    if report.preemptions or report.replays:
        rows.append(("preempted, replayed", f"{report.preemptions}, {report.replays}"))
    return rows
