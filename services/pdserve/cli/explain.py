"""`pdserve explain`: why one request was sent where it was, what it waited for, and what had been predicted of it."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.console import DEFAULT_TARGET, Target, run, stdout_console
from pdserve.cli.reach import DEFAULT_CONNECT_TIMEOUT, ConnectTimeout, router

if TYPE_CHECKING:
    from pdserve.client import Explanation


def explain(
    request_id: Annotated[str, typer.Argument(help="The request; `pdserve trace` lists the latest.")],
    target: Target = DEFAULT_TARGET,
    connect_timeout: ConnectTimeout = DEFAULT_CONNECT_TIMEOUT,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show each decision that the router made for a request: the candidates with their predicted times, best first, the
    rule that won, and prediction beside outcome. A router remembers the latest requests only (--trace-ring)."""
    run(_explain(target, connect_timeout, request_id, as_json))


async def _explain(target: str, connect_timeout: float, request_id: str, as_json: bool) -> None:
    async with router(target, connect_timeout) as client:
        found = await client.explain(request_id)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found)))
    else:
        show(found)


def show(found: Explanation) -> None:
    """Print it as wide as the terminal; a pipe gets plain characters."""
    from pdserve.cli.explanation import explanation

    console, ascii_only = stdout_console()
    for part in explanation(found, console.width, ascii_only=ascii_only):
        console.print(part)
