"""`pdserve bench`: put load on a target, and say what its users would see."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.console import DEFAULT_TARGET, fail, run, show_table
from pdserve.cli.plot_file import check_plot
from pdserve.core.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.bench.plan import Measured, Plan, Search
    from pdserve.bench.target import Asking
    from pdserve.core.slo import SloTargets

FEW_RUNS = 12


def bench(
    target: Annotated[
        str,
        typer.Option(envvar="PDSERVE_TARGET", help="A router, as host:port; or OpenAI's API, as http://host:port/v1."),
    ] = DEFAULT_TARGET,
    model: Annotated[str, typer.Option(help="May be left out where just one is served.")] = "",
    rate: Annotated[
        float | None, typer.Option(help="Requests (conversations) a second; a trace is replayed so many times as fast.")
    ] = None,
    streams: Annotated[int | None, typer.Option(min=1, help="Instead: a closed loop of so many users.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="How many; default 1000, of a trace all.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Mooncake's JSONL, Azure's or vidur's CSV.")] = None,
    mix: Annotated[
        str | None, typer.Option(help='Instead: prompt/answer tokens, as "80% 128/64 + 20% 2048/16".')
    ] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Instead: mean tokens of a prompt.")] = None,
    output_tokens: Annotated[int | None, typer.Option(min=1, help="With it: mean tokens of an answer.")] = None,
    prompt_cv: Annotated[float, typer.Option(min=0, help="Coefficient of variation; 0: always the mean.")] = 0.0,
    output_cv: Annotated[float, typer.Option(min=0, help="The same of answers.")] = 0.0,
    burstiness: Annotated[
        float, typer.Option(help="Coefficient of variation of the gaps between arrivals (Gamma); 1: Poisson.")
    ] = 1.0,
    turns: Annotated[int, typer.Option(min=1, help="Requests of a conversation; each repeats all before it.")] = 1,
    think: Annotated[float, typer.Option(help="Mean seconds before the next turn.")] = 1.0,
    system_tokens: Annotated[int, typer.Option(min=0, help="Tokens that all prompts begin with.")] = 0,
    ttft_ms: Annotated[float, typer.Option(help="Target for the time to first token.")] = 500.0,
    itl_ms: Annotated[float, typer.Option(help="Target for the gap between tokens.")] = 50.0,
    itl_percentile: Annotated[float, typer.Option(help="Of a request's own gaps, that must keep it.")] = 99.0,
    ask_slo: Annotated[bool, typer.Option("--ask-slo", help="Tell a router both targets with each request.")] = False,
    find_rate: Annotated[
        bool, typer.Option("--find-rate", help="Search the highest rate that keeps the targets; begins at --rate.")
    ] = False,
    attainment: Annotated[float, typer.Option(min=0.01, max=1, help="Share of requests that must keep them.")] = 0.9,
    precision: Annotated[float, typer.Option(help="Of the rate that is found, relative.")] = 0.05,
    max_runs: Annotated[int, typer.Option(min=1, help="Runs of a search at most.")] = FEW_RUNS,
    gpus: Annotated[float | None, typer.Option(min=0, help="That the target has; a router tells it.")] = None,
    cores: Annotated[float | None, typer.Option(min=0, help="The same of CPU cores.")] = None,
    pid: Annotated[
        list[int], typer.Option(help="A process of the target here: its CPU time, and its children's. Repeatable.")
    ] = [],  # noqa: B006  nobody changes it
    warmup: Annotated[int, typer.Option(min=0, help="Requests before it, which do not count.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals, lengths and tokens.")] = 0,
    salt: Annotated[
        str | None, typer.Option(help="The cache salt of all requests; '' sends none. Default: a new one each time.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.001, metavar="SECONDS", help="What a request may take.")] = 600.0,
    vocab: Annotated[
        int | None, typer.Option(min=8, help="The model's vocabulary, where the target is no router.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Its tokenizer.json: prompts without special tokens.")] = None,
    drop_long: Annotated[
        bool, typer.Option("--drop-long", help="Leave out requests that are too long for the model.")
    ] = False,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Of an OpenAI endpoint.")] = "",
    output: Annotated[Path | None, typer.Option(help="Write the whole result with every request, as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it: FILE.png or FILE.html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, without the requests.")] = False,
) -> None:
    """Put load on a router or on any OpenAI endpoint, and say what its users would see.

    Open loop (--rate) or closed (--streams); of a trace, a mix, or prompts of one length. Ends with code 1, and without
    figures, where this client could not keep up.
    """
    import uvloop

    from pdserve.bench.load import Load, parse_mix
    from pdserve.bench.plan import Plan
    from pdserve.bench.rates import RateSearch
    from pdserve.bench.target import Asking, check_target

    try:
        check_target(target)
        if (prompt_tokens is None) != (output_tokens is None) or (prompt_tokens is not None and mix is not None):
            raise ConfigError("--prompt-tokens and --output-tokens go together, and without --mix")
        if find_rate and streams is not None:
            raise ConfigError("--find-rate searches a rate, which --streams has none of")
        kinds = parse_mix(mix) if mix else ()
        if prompt_tokens is not None and output_tokens is not None:
            kinds = ((1.0, prompt_tokens, output_tokens),)
        load = Load(
            requests=requests,
            rate=rate,
            streams=streams,
            trace=trace,
            mix=kinds,
            prompt_cv=prompt_cv,
            output_cv=output_cv,
            burstiness=burstiness,
            turns=turns,
            think=think,
            system=system_tokens,
        )
        # What cannot be is said before anybody is asked.
        load.arrivals(seed)
        if find_rate and rate is not None:
            RateSearch(rate, precision, max_runs)
        plan = Plan(
            load=load,
            targets=_targets(ttft_ms, itl_ms, itl_percentile),
            seed=seed,
            warmup=warmup,
            timeout=timeout,
            gpus=gpus,
            cores=cores,
            pids=tuple(pid),
            vocab=vocab,
            tokenizer=tokenizer,
            drop_long=drop_long,
        )
        if plot is not None:
            check_plot(plot)
        if output is not None and not output.parent.is_dir():
            raise ConfigError(f"--output: there is no folder {output.parent}")
    except ConfigError as error:
        fail(str(error), code=2)
    asking = Asking(
        model=model,
        salt=secrets.token_hex(8) if salt is None else salt,
        slo_ms=(ttft_ms, itl_ms) if ask_slo else None,
        api_key=api_key,
    )
    search = (attainment, precision, max_runs) if find_rate else None
    # The client's own share of the time is less on this loop.
    run(_bench(target, asking, plan, search, Outlets(output, plot, as_json)), loop_factory=uvloop.new_event_loop)


@dataclass(frozen=True, slots=True)
class Outlets:
    """Where a result goes."""

    output: Path | None
    plot: Path | None
    as_json: bool


async def _bench(
    target: str, asking: Asking, plan: Plan, search: tuple[float, float, int] | None, outlets: Outlets
) -> None:
    """Measure, then write and show. `search`: attainment, precision and most runs."""
    from pdserve.bench.report import request_row, result
    from pdserve.bench.session import Bench
    from pdserve.bench.target import connect
    from pdserve.cli.bench_progress import shown

    with shown() as progress:
        async with connect(target, asking) as peer:
            measuring = Bench(peer, plan, progress)
            await measuring.prepare()
            found = await measuring.find_rate(*search, progress.told) if search else None
            measured = (found.best() or found.runs[-1]) if found else await measuring.measure()
    facts = result(target, measuring.facts, asking.salt, plan, measured, found)
    if outlets.output:
        rows = [] if measured.refused else [request_row(record) for record in measured.records]
        _write(outlets.output, json.dumps({**facts, "requests": rows}) + "\n")
    if outlets.plot and measured.figures:
        from pdserve.bench.plot import write

        write(outlets.plot, f"{measuring.facts.model} at {target}", plan, measured, found)
    if outlets.as_json:
        typer.echo(json.dumps(facts))
    else:
        _show(measured, found, plan.targets)
    _judge(measured, found)  # on stderr


def _show(measured: Measured, search: Search | None, targets: SloTargets) -> None:
    from pdserve.bench.report import LATENCIES, RUNS, figure_rows, latency_rows, run_rows

    if search is not None:
        show_table("", RUNS, run_rows(search), numbers=range(len(RUNS) - 1))
        if search.state.passed is not None:
            kept = f"with {search.attainment:.0%} of the requests within both targets"
            typer.echo(f"{search.state.passed:.3f} a second is the highest rate {kept}; of that run:")
    if measured.figures is None:
        return
    show_table("", LATENCIES, latency_rows(measured.figures), numbers=range(1, len(LATENCIES)))
    show_table("", ("", ""), figure_rows(measured.figures, targets), numbers=())


def _judge(measured: Measured, search: Search | None) -> None:
    """Say how a search ended, and fail where there are no figures to rely on."""
    if search is None:
        if measured.refused:
            fail(f"nothing is reported, for {measured.refused}")
        return
    if search.state.passed is None:
        fail(f"no rate kept the targets for {search.attainment:.0%} of the requests; {search.ended_early}")
    if search.ended_early:
        typer.echo(f"pdserve: less exact than it should be: {search.ended_early}", err=True)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def _targets(ttft_ms: float, itl_ms: float, percentile: float) -> SloTargets:
    from pdserve.core.slo import SloTargets

    try:
        return SloTargets(ttft_ms / 1e3, itl_ms / 1e3, percentile)
    except ValueError:
        said = "--ttft-ms and --itl-ms must be above 0, --itl-percentile above 0 and at most 100"
        raise ConfigError(said) from None
