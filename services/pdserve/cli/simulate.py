"""`pdserve simulate`: a fleet under a virtual clock, driven by the router's own policies."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from pdserve.cli.console import fail, show_table
from pdserve.cli.plot_file import check_plot
from pdserve.core.errors import ConfigError, InvalidRequest


def _print_schema(wanted: bool) -> None:
    if wanted:
        from pdserve.simulator.config import SimulationSettings

        typer.echo(json.dumps(SimulationSettings.model_json_schema(), indent=2))
        raise typer.Exit


def simulate(
    plan: Annotated[
        Path | None, typer.Argument(help="YAML file: fleet, workload, model, cost, policy, admission, slo, seed.")
    ] = None,
    prefill: Annotated[int | None, typer.Option(min=0, help="Prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(min=0, help="Decode workers.")] = None,
    colocated: Annotated[int | None, typer.Option(min=0, help="Workers that do both, instead.")] = None,
    model: Annotated[str | None, typer.Option(help="As llama3-8b: its shape, for KV and rooflines.")] = None,
    hardware: Annotated[str | None, typer.Option(help="As h100: a roofline of it is the cost model.")] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="Accelerators of one worker, in tensor parallel.")] = None,
    measured: Annotated[
        Path | None, typer.Option(help="Instead of hardware: what `pdserve probe speed --json` printed.")
    ] = None,
    link: Annotated[str | None, typer.Option(help="A worker's network, as 200Gbit/s.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Requests: Mooncake's JSONL, Azure's or vidur's CSV.")] = None,
    prompt_tokens: Annotated[float | None, typer.Option(help="Instead of a trace: mean tokens of a prompt.")] = None,
    output_tokens: Annotated[float | None, typer.Option(help="Instead of a trace: mean tokens of an answer.")] = None,
    rate: Annotated[
        float | None, typer.Option(help="A trace is replayed so many times as fast; else requests a second.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="How many: the first ones of a trace.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="default, as the router; kv-aware-global, kv-aware, load-balance, random.")
    ] = None,
    ttft_ms: Annotated[float | None, typer.Option(help="Target for the time to first token.")] = None,
    itl_ms: Annotated[float | None, typer.Option(help="Target for the gap between tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of what is drawn.")] = None,
    change: Annotated[
        list[str], typer.Option("--set", help="KEY=VALUE over file and flags, as fleet.kv_tokens=100000. Repeatable.")
    ] = [],  # noqa: B006  nobody changes it
    plot: Annotated[Path | None, typer.Option(help="Draw it: FILE.png or FILE.html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    schema: Annotated[
        bool,
        typer.Option("--schema", callback=_print_schema, is_eager=True, help="Print the file's JSON schema and exit."),
    ] = False,
) -> None:
    """Simulate a fleet, and say what its users would see. Same input, same result, to the bit.

    The fleet is in a YAML file, in flags, or in both: flags are over the file, and --set is over flags.
    """
    from pdserve.simulator.config import SimulationSettings
    from pdserve.simulator.flags import Flags, parse_changes
    from pdserve.simulator.report import Report
    from pdserve.simulator.rows import LATENCIES, figure_rows, latency_rows, tenants
    from pdserve.simulator.simulation import Simulation

    said = Flags(
        prefill=prefill,
        decode=decode,
        colocated=colocated,
        link=link,
        model=model,
        hardware=hardware,
        devices=devices,
        measured=measured,
        trace=trace,
        rate=rate,
        requests=requests,
        prompt=prompt_tokens,
        output=output_tokens,
        policy=policy,
        ttft_ms=ttft_ms,
        itl_ms=itl_ms,
        seed=seed,
    )
    try:
        if plot:
            check_plot(plot)
        settings = SimulationSettings.load(plan, parse_changes(change), said)
        simulation = Simulation(settings.plan(), settings.routing())
        began = time.perf_counter()
        simulation.run(settings.arrivals())
    except ConfigError as error:
        fail(str(error), code=2)
    except InvalidRequest as error:
        fail(f"a request can never be served: {error}")
    report, took = Report.of(simulation, settings.targets()), time.perf_counter() - began
    by_tenant = tenants(simulation.requests)
    if plot:
        from pdserve.simulator.drawing import Drawing
        from pdserve.simulator.plot import write

        write(plot, Drawing.of(settings.title(), simulation, report, settings.targets()))
    if as_json:
        shares = {name: dataclasses.asdict(tenant) for name, tenant in by_tenant.items()}
        facts = {**report.as_dict(), "tenants": shares, "simulation_seconds": took}
        typer.echo(json.dumps(_numbers(facts), allow_nan=False))
        return
    show_table("", LATENCIES, latency_rows(report, by_tenant), numbers=range(1, len(LATENCIES)))
    show_table("", ("", ""), figure_rows(report, settings.targets()), numbers=())
    typer.echo(f"{report.requests} requests, {report.seconds:.0f} s simulated in {took:.1f} s", err=True)


def _numbers(value: Any) -> Any:
    """As JSON has it, which knows no NaN: a mean of nothing is null."""
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
