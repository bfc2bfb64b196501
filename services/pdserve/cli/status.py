"""`pdserve status`: the workers of a fleet, as its router sees them."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.console import run
from pdserve.cli.generate import DEFAULT_TARGET

if TYPE_CHECKING:
    from pdserve.client import FleetWorker

NUMBERS = ("running / waiting", "blocks free / cached", "owned / reserved", "outstanding tokens")
COLUMNS = ("role", "worker", "model", "state", *NUMBERS)
WIDE = 160


def status(
    target: Annotated[str, typer.Option(help="The router, as host:port.")] = DEFAULT_TARGET,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a worker, a line each.")] = False,
) -> None:
    """Show the workers: roles, load, KV blocks, and the tokens that this router has outstanding on each."""
    run(_status(target, as_json))


async def _status(target: str, as_json: bool) -> None:
    from pdserve.client import Client

    async with Client(target) as client:
        fleet = await client.fleet()
    if as_json:
        for worker in fleet:
            typer.echo(json.dumps(dataclasses.asdict(worker)))
        return
    from rich.box import ASCII, HEAVY_HEAD
    from rich.console import Console
    from rich.table import Table

    terminal = Console().is_terminal
    console = Console() if terminal else Console(width=WIDE)  # a pipe has no width to keep to
    table = Table(title=f"workers of {target}", title_justify="left", box=HEAVY_HEAD if terminal else ASCII)
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in NUMBERS else "left", overflow="fold")
    for worker in fleet:
        table.add_row(*row(worker))
    console.print(table)


def row(worker: FleetWorker) -> tuple[str, ...]:
    """The table's cells, in the order of COLUMNS."""
    state = "draining" if worker.draining else "connected" if worker.connected else "unreachable"
    held = f"{worker.owned_blocks} / {worker.reserved_blocks}"
    return (
        worker.role or "?",
        worker.worker_id or worker.endpoint,
        worker.model,
        state,
        f"{worker.running} / {worker.waiting}",
        f"{worker.free_blocks} / {worker.cached_blocks}",
        held,
        str(worker.outstanding_tokens),
    )
