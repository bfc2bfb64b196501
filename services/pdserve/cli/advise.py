"""`pdserve advise`: disaggregate or not, with which ratio, by what margin."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.console import DEFAULT_TARGET, Target, fail, run, show_table
from pdserve.cli.reach import DEFAULT_CONNECT_TIMEOUT, ConnectTimeout
from pdserve.core.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from pdserve.cli.advise_source import Source
    from pdserve.simulator.advice import Advice
    from pdserve.simulator.advice_rows import Price

REQUESTS = 500


def advise(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(help="Mooncake's JSONL, Azure's or vidur's CSV, a JSON result of a bench.")
    ] = None,
    target: Target = DEFAULT_TARGET,
    metrics: Annotated[str | None, typer.Option(metavar="URL", help="A router's metrics, or vLLM's.")] = None,
    rate: Annotated[
        float | None, typer.Option(help="With --metrics: requests a second, instead of what is seen.")
    ] = None,
    watch: Annotated[float, typer.Option(min=1.0, help="With --metrics: seconds in which the rate is seen.")] = 10.0,
    served_model: Annotated[str | None, typer.Option(help="Of a running suite with several.")] = None,
    requests: Annotated[int, typer.Option(min=2, help="At most so many: a file's first, a suite's latest.")] = REQUESTS,
    workers: Annotated[
        int | None, typer.Option(min=2, help="In the fleets that are compared; else as many as the load needs.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="As llama3-8b: its shape, for KV and rooflines.")] = None,
    hardware: Annotated[str | None, typer.Option(help="As h100: a roofline of it is the cost model.")] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="Accelerators of one worker, in tensor parallel.")] = None,
    measured: Annotated[
        Path | None, typer.Option(help="Instead of hardware: what `pdserve probe speed --json` printed.")
    ] = None,
    link: Annotated[str | None, typer.Option(help="A worker's network, as 200Gbit/s.")] = None,
    ttft_ms: Annotated[float | None, typer.Option(help="Target for the time to first token.")] = None,
    itl_ms: Annotated[float | None, typer.Option(help="Target for the gap between tokens.")] = None,
    attainment: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="The share of requests that have to keep both targets.")
    ] = 0.9,
    margin: Annotated[float, typer.Option(min=0.0, help="Up to this gain it is a tie, and a tie means no.")] = 0.1,
    gpu_hour_cost: Annotated[float | None, typer.Option(min=0.0, help="Of one GPU, for the cost of a request.")] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn, with --metrics.")] = 0,
    change: Annotated[
        list[str], typer.Option("--set", help="KEY=VALUE over flags, as fleet.kv_tokens=100000. Repeatable.")
    ] = [],  # noqa: B006  nobody changes it
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    connect_timeout: ConnectTimeout = DEFAULT_CONNECT_TIMEOUT,
) -> None:
    """Disaggregate or not: simulate tuned co-located workers against prefill and decode workers, under a trace, the
    requests of a bench, or what a running suite served last.

    The answer is no where neither serves more by a margin, and where the load needs no more than two co-located
    workers. Same input, same answer.
    """
    from pdserve.cli import advise_source as sources
    from pdserve.simulator.advice import Question, advise
    from pdserve.simulator.advice_rows import Price, as_dict, doubts
    from pdserve.simulator.advice_settings import advice_ground
    from pdserve.simulator.flags import Flags, parse_changes

    said = Flags(
        model=model,
        hardware=hardware,
        devices=devices,
        measured=measured,
        link=link,
        ttft_ms=ttft_ms,
        itl_ms=itl_ms,
    )
    found: list[Source] = []

    async def look() -> None:
        if metrics is not None:
            found.append(await sources.from_metrics(metrics, served_model, rate, watch, requests, seed))
        else:
            found.append(await sources.from_router(target, served_model, requests, connect_timeout))

    try:
        _check_contradictions(context)
        changes = parse_changes(change)
        if file is not None:
            found.append(sources.from_file(file, requests))
        else:
            run(look())
        source = found[0]
        ground = advice_ground(said, changes, source.defaults)
        plan, devices, title = sources.compared(source, ground)
        question = Question(workers, attainment, margin)
        with _progress() as made:
            advice = advise(plan, source.arrivals, question, made)
    except ConfigError as error:
        fail(str(error), code=2)
    except InvalidRequest as error:
        fail(f"a request can never be served: {error}")
    price, notes = Price(devices, gpu_hour_cost), [*source.notes, *doubts(advice)]
    if as_json:
        about = {
            "source": source.name,
            "compared": title,
            "targets": dataclasses.asdict(ground.targets()),
            "notes": notes,
        }
        typer.echo(json.dumps({**as_dict(advice, question, price), **about}, allow_nan=False))
        return
    targets = f"{attainment:.0%} within {1e3 * ground.targets().ttft:g} ms and {1e3 * ground.targets().itl:g} ms"
    typer.echo(f"{source.name}, on {title}; wanted: {targets}")
    _show(advice, price)
    for note in notes:
        typer.echo(f"note: {note}")
    typer.echo(f"\n{advice.verdict.sentence}.")


def _show(advice: Advice, price: Price) -> None:
    from pdserve.simulator import advice_rows as rows

    show_table("", rows.LENGTHS, rows.length_rows(advice), numbers=range(1, len(rows.LENGTHS)))
    show_table("", ("", ""), rows.load_rows(advice), numbers=())
    if advice.tried:
        title = f"{advice.workers} workers, the best of each ratio; * is compared"
        show_table(title, rows.FLEETS, rows.fleet_rows(advice, price), numbers=range(3, len(rows.FLEETS)))
        show_table("", rows.OWN_RATE, rows.own_rate_rows(advice), numbers=(1, 2))


def _check_contradictions(context: typer.Context) -> None:
    """Raises ConfigError for options that leave open what is to be judged, or have nothing to do with it."""

    def typed(name: str) -> bool:
        source = context.get_parameter_source(name)
        return source is not None and source.name == "COMMANDLINE"

    options = {"file": "FILE", "target": "--target", "metrics": "--metrics"}
    said = [option for name, option in options.items() if typed(name)]
    if len(said) > 1:
        raise ConfigError(f"{' and '.join(said)} are two things to judge; give one")
    if typed("rate") and typed("watch"):
        raise ConfigError("--rate says what --watch would find out; give one or the other")
    for name in ("rate", "watch", "seed"):
        if typed(name) and not typed("metrics"):
            raise ConfigError(f"--{name} is for requests that are drawn from --metrics")
    if typed("served_model") and typed("file"):
        raise ConfigError("--served-model is for a running suite; a file's requests are all of one model")


@contextmanager
def _progress() -> Iterator[Callable[[int], None]]:
    """How many simulations there were, on stderr where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console

    with Console(stderr=True).status("simulating") as status:
        yield lambda count: status.update(f"simulating: {count} fleets and rates so far")
