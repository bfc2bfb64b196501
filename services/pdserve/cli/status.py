"""`pdserve status`: the workers of a fleet and the links between them, as its router sees them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.console import DEFAULT_TARGET, Target, run, show_table
from pdserve.cli.reach import DEFAULT_CONNECT_TIMEOUT, ConnectTimeout, router
from pdserve.core.fabric import say_bytes

if TYPE_CHECKING:
    from pdserve.client import FleetWorker

WORKERS = ("role", "worker", "state", *("run /\nwait", "free /\ncached", "owned /\nreserved", "tokens\nahead"))
CACHES = ("role", "worker", "state", "blocks")
PREFIX_CACHE = "prefix_cache"
LINKS = ("from", "to", "transport", "path", "GB/s", "rtt ms", "in flight", "")
WARNING = "!"


def status(
    target: Target = DEFAULT_TARGET,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a worker, a line each.")] = False,
    connect_timeout: ConnectTimeout = DEFAULT_CONNECT_TIMEOUT,
) -> None:
    """Show the workers: sequences that run and wait, KV blocks by state, and the tokens that are ahead of each, of this
    router's requests; then their KV links, with ! where one took a slower path than it should."""
    run(_status(target, connect_timeout, as_json))


async def _status(target: str, connect_timeout: float, as_json: bool) -> None:
    from pdserve.client import NO_RETRIES

    async with router(target, connect_timeout, retry=NO_RETRIES) as client:
        fleet = await client.fleet()
    if as_json:
        for worker in fleet:
            typer.echo(json.dumps(dataclasses.asdict(worker)))
        return
    caches = [worker for worker in fleet if worker.role == PREFIX_CACHE]
    others = [worker for worker in fleet if worker.role != PREFIX_CACHE]
    for model in dict.fromkeys(worker.model for worker in others) or [""]:
        title = f"workers of {target}" + (f", {model}" if model else "")
        rows = [row(worker) for worker in others if worker.model == model]
        show_table(title, WORKERS, rows, numbers=range(3, len(WORKERS)))
    if caches:
        show_table("prefix caches", CACHES, map(cache_row, caches), numbers=[3])
    links = list(link_rows(fleet))
    if links:
        show_table("KV links, each way", LINKS, links, numbers=range(4, 7))
    for warning in degraded(fleet):
        typer.echo(f"{WARNING} {warning}")


def row(worker: FleetWorker) -> tuple[str, ...]:
    """The table's cells, in the order of WORKERS."""
    return (
        *_who(worker),
        f"{worker.running} / {worker.waiting}",
        f"{worker.free_blocks} / {worker.cached_blocks}",
        f"{worker.owned_blocks} / {worker.reserved_blocks}",
        str(worker.outstanding_tokens),
    )


def cache_row(worker: FleetWorker) -> tuple[str, ...]:
    """The cells of a prefix cache, in the order of CACHES."""
    return (*_who(worker), str(worker.cached_blocks))


def _who(worker: FleetWorker) -> tuple[str, str, str]:
    from pdserve.cli.view import state_of

    return (worker.role.replace("_", "-") or "?", worker.worker_id or worker.endpoint, state_of(worker))


def link_rows(fleet: Iterable[FleetWorker]) -> Iterator[tuple[str, ...]]:
    """The cells of each link's two ends, in the order of LINKS; prefill workers' ends first. "-" is not measured."""
    for worker in sorted(fleet, key=lambda worker: (worker.role != "prefill", worker.worker_id)):
        for link in worker.links if worker.connected else ():
            yield (
                worker.worker_id,
                link.peer,
                link.transport,
                link.path,
                f"{link.bytes_per_second / 1e9:.2f}" if link.bytes_per_second else "-",
                f"{1e3 * link.round_trip_seconds:.2f}" if link.round_trip_seconds else "-",
                say_bytes(link.bytes_in_flight),
                WARNING if link.degraded else "",
            )


def degraded(fleet: Iterable[FleetWorker]) -> Iterator[str]:
    """A sentence for each end of a link that took a slower path than it should."""
    for worker in fleet:
        for link in worker.links if worker.connected else ():
            if link.degraded:
                yield f"{worker.worker_id} to {link.peer} goes over {link.path}: {link.degraded}"
