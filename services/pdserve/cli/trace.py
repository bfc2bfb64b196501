"""`pdserve trace`: where the time of one request went, on all services; without an id, which requests there are."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.console import DEFAULT_TARGET, Target, run, show_table, stdout_console
from pdserve.cli.reach import DEFAULT_CONNECT_TIMEOUT, ConnectTimeout, router

if TYPE_CHECKING:
    from pdserve.client import Client, RequestSummary, Trace

REQUESTS = ("request", "model", "outcome", "workers", "ago", "ms", "first\nms", "in /\nout")


def trace(
    request_id: Annotated[str, typer.Argument(help="The request; without one, the latest are listed.")] = "",
    target: Target = DEFAULT_TARGET,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many requests to list.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object; a line each for a list.")] = False,
    connect_timeout: ConnectTimeout = DEFAULT_CONNECT_TIMEOUT,
) -> None:
    """Show one request's spans on router, prefill, decode and prefix cache, on a common time axis. Routers and workers
    remember the latest requests only (--trace-ring)."""
    asking = router(target, connect_timeout)
    run(_trace(asking, request_id, as_json) if request_id else _list(asking, target, limit, as_json))


async def _trace(asking: AbstractAsyncContextManager[Client], request_id: str, as_json: bool) -> None:
    async with asking as client:
        found = await client.trace(request_id)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found)))
    else:
        show(found)


def show(found: Trace) -> None:
    """Print a waterfall as wide as the terminal; a pipe gets plain characters."""
    from pdserve.cli.waterfall import joined, notes, summary, waterfall

    console, ascii_only = stdout_console()
    for line in summary(found):
        console.print(line, markup=False)
    console.print()
    console.print(joined(waterfall(found, console.width, ascii_only=ascii_only)))
    remarks = list(notes(found))
    if remarks:
        console.print()
    for remark in remarks:
        console.print(remark, style="red" if remark.startswith("!") else "dim", markup=False)


async def _list(asking: AbstractAsyncContextManager[Client], target: str, limit: int, as_json: bool) -> None:
    async with asking as client:
        found = await client.traces(limit)
    if as_json:
        for request in found:
            typer.echo(json.dumps(dataclasses.asdict(request)))
        return
    rows = request_rows(found, time.time_ns())
    show_table(f"latest requests of {target}", REQUESTS, rows, numbers=range(4, len(REQUESTS)), whole=(0,))
    if found:
        typer.echo(f"try: pdserve trace {found[0].request_id} --target {target}", err=True)


def request_rows(requests: Iterable[RequestSummary], now_ns: int) -> Iterable[tuple[str, ...]]:
    """The cells of the list, in the order of REQUESTS."""
    for request in requests:
        usage = request.usage
        yield (
            request.request_id,
            request.model,
            request.finish_reason.value if request.finish_reason else request.code.lower() or request.state.value,
            ", ".join(request.workers) or "-",
            ago((now_ns - request.arrived_ns) / 1e9),
            f"{request.duration_ms:.0f}",
            "-" if request.ttft_ms is None else f"{request.ttft_ms:.0f}",
            f"{usage.prompt_tokens} / {usage.completion_tokens}",
        )


def ago(seconds: float) -> str:
    """A time in the past in one short word; clocks may differ, so never below 0."""
    seconds = max(0.0, seconds)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
