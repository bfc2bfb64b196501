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

COLUMNS = ("role", "id", "endpoint", "model", "state", "running", "waiting", "free", "cached", "owned", "reserved")


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
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"fleet of {target}")
    for name in (*COLUMNS, "outstanding"):
        table.add_column(name, justify="left" if name in COLUMNS[:5] else "right", overflow="fold")
    for worker in fleet:
        table.add_row(*row(worker))
    console = Console()
    console.print(table, width=None if console.is_terminal else 160)  # a pipe is no reason to cut columns


def row(worker: FleetWorker) -> tuple[str, ...]:
    """The table's cells, in the order of COLUMNS and then outstanding tokens. Counts of blocks for the blocks."""
    state = "draining" if worker.draining else "connected" if worker.connected else "unreachable"
    numbers = (worker.running, worker.waiting, worker.free_blocks, worker.cached_blocks, worker.owned_blocks)
    texts = (worker.role or "?", worker.worker_id or "?", worker.endpoint, worker.model, state)
    return (*texts, *(str(number) for number in (*numbers, worker.reserved_blocks, worker.outstanding_tokens)))
