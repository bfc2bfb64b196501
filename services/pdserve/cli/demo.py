"""`pdserve demo`: a whole suite for two questions, and where the time of each went."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdserve.cli.console import run, start_progress
from pdserve.cli.serve import resolve_parts

if TYPE_CHECKING:
    from rich.table import Table

    from pdserve.client import Client, Finish, Stages

DEMO_MODEL = "smollm2-135m-instruct"
DEFAULT_PROMPT = "Tell me about the ocean."
AGAIN = "Explain it to a child."
# Long enough for a prefix worth keeping: about 200 tokens.
SYSTEM = """\
You are a friendly science teacher. You explain how things work to curious people of every age. You use
plain words and examples from everyday life. You like questions about light and colour, heat and cold, sound
and music, plants and animals, the weather and the sea, the stars and the planets. Light from the sun is a
mixture of all colours. Air scatters blue light more than red light. Water boils when it is hot enough and
freezes when it is cold enough. Sound is a wave that travels through air, and it travels faster through
water. Plants make sugar from sunlight, water and air. Bees carry pollen from flower to flower. The moon
shines because the sun lights it, and it pulls the tides. The planets go round the sun, and the sun is a
star among many others. Mountains rise where plates of rock push against each other, and rivers carry them
slowly to the sea. Metals carry heat and electricity well, and wood does not. You know that good answers
begin with the cause and go on to what follows from it.""".replace("\n", " ")


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer. Times are milliseconds by this client's clock; `gaps` has each wait between two tokens."""

    text: str
    ttft_ms: float
    gaps: tuple[float, ...]
    finish: Finish


def demo(
    prompt: Annotated[str, typer.Argument(help="The first question.")] = DEFAULT_PROMPT,
    model: Annotated[str, typer.Option(help="Folder, hub id or smollm2-135m-instruct.")] = DEMO_MODEL,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 96,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Start router, prefill, decode and prefix cache as processes, ask two questions, show where the time went."""
    logs = Path(tempfile.mkdtemp(prefix="pdserve-demo-"))
    finished = False

    async def main() -> None:
        nonlocal finished
        await _demo(prompt.strip() or DEFAULT_PROMPT, model, max_tokens, dtype, device, logs)
        finished = True

    try:
        run(main())
    finally:
        if finished:
            shutil.rmtree(logs, ignore_errors=True)
        else:
            typer.echo(f"logs in {logs}", err=True)


async def _demo(prompt: str, model: str, max_tokens: int, dtype: str | None, device: str, logs: Path) -> None:
    from pdserve.client import Client
    from pdserve.launch import Machine, Suite, WorkerOptions, plan_suite

    parts = await resolve_parts([model], [(1, 1, 0)])
    plan = plan_suite(parts, Machine.here(), WorkerOptions(dtype=dtype, device=device), prefix_caches=1)
    async with AsyncExitStack() as stack:
        started = time.monotonic()
        with start_progress() as listener:
            suite = await stack.enter_async_context(Suite(plan, log_folder=logs, listener=listener))
        names = ", ".join(f"{service.name} at {service.endpoint}" for service in suite.services)
        typer.echo(f"ready after {time.monotonic() - started:.1f} s: {names}\n")
        client = await stack.enter_async_context(Client(suite.endpoint))
        questions = (prompt, f"{prompt} {AGAIN}")  # after the same system message: one long prefix, kept in the cache
        answers = [await _ask(client, question, max_tokens) for question in questions]
    _show(answer_table(answers))


async def _ask(client: Client, question: str, max_tokens: int) -> Answer:
    """Stream one answer to stdout and measure it."""
    from pdserve.client import Finish, Output

    # Greedy, so that everybody sees the same; small models repeat themselves then, unless that costs something.
    options: dict[str, Any] = {"temperature": 0.0, "frequency_penalty": 1.0, "max_tokens": max_tokens}
    conversation = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    typer.secho(f"> {question}", bold=True)
    start = time.perf_counter()
    arrivals: list[float] = []
    text: list[str] = []
    finish: Finish | None = None
    async with aclosing(client.generate(conversation, **options)) as events:
        async for event in events:
            if isinstance(event, Output):
                arrivals += [time.perf_counter()] * len(event.tokens)  # tokens that come together: gaps of 0
                text.append(event.text)
                sys.stdout.write(event.text)
                sys.stdout.flush()
            elif isinstance(event, Finish):
                finish = event
    typer.echo("\n")
    assert finish is not None  # the client raises when a stream ends without one
    gaps = tuple((later - earlier) * 1e3 for earlier, later in pairwise(arrivals))
    return Answer("".join(text), ((arrivals[0] if arrivals else time.perf_counter()) - start) * 1e3, gaps, finish)


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` of all values do not exceed (nearest rank); None without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))] if ordered else None


def answer_rows(answers: Sequence[Answer]) -> list[tuple[str, list[str]]]:
    """What the table says: a label, and a text for each answer."""

    def ms(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f} ms"

    usages = [answer.finish.usage for answer in answers]
    stages = [usage.stages for usage in usages]
    return [
        ("time to first token", [ms(answer.ttft_ms) for answer in answers]),
        ("  queue", [ms(stage.queue_ms) for stage in stages]),
        ("  reserve", [ms(stage.reserve_ms) for stage in stages]),
        ("  prefill", [ms(stage.prefill_ms) for stage in stages]),
        ("  outside the router", [ms(outside(answer)) for answer in answers]),
        ("first gap", [ms(first_gap(stage)) for stage in stages]),
        ("  transfer, not hidden", [ms(stage.transfer_exposed_ms) for stage in stages]),
        ("  decode wait", [ms(stage.decode_wait_ms) for stage in stages]),
        ("  first step", [ms(stage.first_step_ms) for stage in stages]),
        ("between tokens, p50", [ms(percentile(answer.gaps, 0.5)) for answer in answers]),
        ("between tokens, p99", [ms(percentile(answer.gaps, 0.99)) for answer in answers]),
        ("tokens in / out", [f"{usage.prompt_tokens} / {usage.completion_tokens}" for usage in usages]),
        ("tokens from cache", [str(usage.cached_tokens) for usage in usages]),
        ("blocks reused", [str(usage.blocks_reused) for usage in usages]),
        ("KV moved", [f"{usage.kv_transfer_bytes / 1e6:.2f} MB" for usage in usages]),
        ("prefill worker", [usage.prefill_worker or "-" for usage in usages]),
        ("decode worker", [usage.decode_worker or "-" for usage in usages]),
    ]


def outside(answer: Answer) -> float:
    """What the client saw of the time to first token and the router did not, in milliseconds: the way, twice."""
    stages = answer.finish.usage.stages
    return max(0.0, answer.ttft_ms - stages.queue_ms - stages.reserve_ms - stages.prefill_ms)


def first_gap(stages: Stages) -> float:
    """From the first token to the second, in milliseconds."""
    return stages.transfer_exposed_ms + stages.decode_wait_ms + stages.first_step_ms


def answer_table(answers: Sequence[Answer]) -> Table:
    """Where the time went, an answer a column."""
    from rich.table import Table

    table = Table(title="where the time went", title_justify="left")
    for name in ("", "first question", "second, same beginning")[: 1 + len(answers)]:
        table.add_column(name, justify="right" if name else "left")
    for label, cells in answer_rows(answers):
        table.add_row(label, *cells)
    return table


def _show(table: Table) -> None:
    from rich.box import ASCII
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
        table.box = ASCII
    console.print(table)
