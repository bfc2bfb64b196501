"""`pdserve probe links`: measure the KV links of a fleet, and set them against the KV that its prefill workers make."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.console import DEFAULT_TARGET, Target, parse_size, run, show_table
from pdserve.cli.reach import DEFAULT_CONNECT_TIMEOUT, ConnectTimeout, InternalSecretFile, own_access, router
from pdserve.cli.watch_worker import address_of, first_load
from pdserve.core.errors import PdserveError, Unavailable
from pdserve.core.fabric import needed_bandwidth, say_bytes, say_rate, verdict
from pdserve.rpc.access import PLAIN, Access

if TYPE_CHECKING:
    from pdserve.client import Client, FleetWorker
    from pdserve.v1 import worker_pb2

PROBE_TIMEOUT = 90.0  # seconds; the worker's own deadlines for opening and measuring are within it
PROMPT_TOKENS = 512  # of the prompt that makes a worker measure how fast it computes
PROMPT_TIMEOUT = 60.0
RATE_TIMEOUT = 3.0  # seconds from a prompt's end until its worker has told its rate; it speaks at least every second
COLUMNS = ("from", "to", "transport", "path", "rtt ms")


@dataclass(frozen=True, slots=True)
class PairReport:
    """What came of one pair; sizes in bytes, rates in bytes a second, times in seconds. `error` empty: it was probed.

    `bytes_per_second` is the fastest of `samples`, which are (frame bytes, bytes a second).
    """

    prefill: str
    decode: str
    kv_token_bytes: float
    prefill_tokens_per_second: float
    error: str = ""
    transport: str = ""
    path: str = ""
    degraded: str = ""
    round_trip_seconds: float = 0.0
    samples: tuple[tuple[int, float], ...] = ()

    @property
    def bytes_per_second(self) -> float:
        return max((rate for _, rate in self.samples), default=0.0)

    @property
    def needed(self) -> float:
        return needed_bandwidth(self.kv_token_bytes, self.prefill_tokens_per_second)

    @property
    def carries(self) -> bool:
        """Whether the link was probed and carries what the prefill worker makes; False where that is unknown."""
        return not self.error and 0 < self.needed <= self.bytes_per_second

    def sentence(self) -> str:
        """What it means."""
        link = f"{self.prefill} to {self.decode}: this link"
        if self.error:
            return f"{link} could not be probed: {self.error}"
        if not self.needed:
            return (
                f"{link} carries {say_rate(self.bytes_per_second)}; how much KV this prefill worker makes is not known."
            )
        return verdict(self.bytes_per_second, self.needed, "the KV of this prefill worker", carrier=link)

    def to_json(self) -> str:
        """One line: the fields, and what follows from them."""
        facts = {"bytes_per_second": self.bytes_per_second, "needed_bytes_per_second": self.needed}
        verdict = {"carries": self.carries, "verdict": self.sentence()}
        return json.dumps({**dataclasses.asdict(self), **facts, **verdict})


def links(
    target: Target = DEFAULT_TARGET,
    frame_bytes: Annotated[
        list[str], typer.Option(help="A size to measure, as 1MiB, capped by what links take. Repeat for more.")
    ] = [],  # noqa: B006  nobody changes it
    bytes_per_size: Annotated[str, typer.Option("--bytes", help="How much to send for each size.")] = "32MiB",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a pair, a line each.")] = False,
    connect_timeout: ConnectTimeout = DEFAULT_CONNECT_TIMEOUT,
    internal_secret_file: InternalSecretFile = None,
) -> None:
    """Measure the link of each prefill worker to each decode worker of its model: bandwidth by frame size, round trip.

    Then say, for each, whether it carries the KV that the prefill worker makes at its measured rate. Ends with 1 where
    a pair does not, or cannot be probed. Measuring shares the links with whatever else they carry.
    """
    sizes = [size for size in map(parse_size, frame_bytes) if size is not None]
    size = parse_size(bytes_per_size) or 0
    if 0 in (size, *sizes):
        raise typer.BadParameter("sizes must be above 0")
    reports: list[PairReport] = []

    async def main() -> None:
        reports.extend(await probe(target, sizes, size, connect_timeout, own_access(internal_secret_file)))

    run(main())
    if as_json:
        for report in reports:
            typer.echo(report.to_json())
    else:
        _show(target, reports)
    if not all(report.carries for report in reports):
        raise typer.Exit(1)


async def probe(
    target: str,
    frame_bytes: Sequence[int],
    bytes_per_size: int,
    connect_timeout: float = DEFAULT_CONNECT_TIMEOUT,
    access: Access = PLAIN,
) -> list[PairReport]:
    """Probe all pairs of the fleet of the router at `target`, one after the other. Raises Unavailable for no pair."""
    async with router(target, connect_timeout) as client:
        pairs = pairs_of(await client.fleet())
        if not pairs:
            raise Unavailable("this fleet has no prefill worker with a decode worker of the same model now")
        workers = {prefill.worker_id: prefill for prefill, _ in pairs}
        rates = {name: await _prefill_rate(client, worker, len(workers), access) for name, worker in workers.items()}
    return [
        await _probe(prefill, decode, rates[prefill.worker_id], frame_bytes, bytes_per_size, access)
        for prefill, decode in pairs
    ]


def pairs_of(fleet: Iterable[FleetWorker]) -> list[tuple[FleetWorker, FleetWorker]]:
    """Connected prefill and decode workers of the same model."""
    up = sorted((worker for worker in fleet if worker.connected), key=lambda worker: worker.worker_id)
    return [
        (prefill, decode)
        for prefill in up
        for decode in up
        if (prefill.role, decode.role, prefill.model) == ("prefill", "decode", decode.model)
    ]


async def _probe(
    prefill: FleetWorker,
    decode: FleetWorker,
    rate: float,
    frame_bytes: Sequence[int],
    bytes_per_size: int,
    access: Access,
) -> PairReport:
    import grpc.aio

    from pdserve.rpc.channel import connect
    from pdserve.rpc.errors import error_from_call
    from pdserve.v1 import worker_pb2, worker_pb2_grpc

    report = PairReport(prefill.worker_id, decode.worker_id, prefill.kv_token_bytes, rate)
    request = worker_pb2.ProbeLinkRequest(
        endpoint=decode.own_endpoint,
        worker_id=decode.worker_id,
        frame_bytes=frame_bytes,
        bytes_per_size=bytes_per_size,
    )
    async with connect(address_of(prefill, access), access) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).ProbeLink(request, timeout=PROBE_TIMEOUT)
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            return dataclasses.replace(report, error=str(error_from_call(error)))
        finally:
            call.cancel()
    return dataclasses.replace(
        report,
        transport=answer.transport,
        path=answer.path,
        degraded=answer.degraded,
        round_trip_seconds=answer.round_trip_seconds,
        samples=tuple((sample.frame_bytes, sample.bytes_per_second) for sample in answer.samples),
    )


async def _prefill_rate(client: Client, worker: FleetWorker, prefill_workers: int, access: Access) -> float:
    """Prompt tokens that `worker` computes in a second, as it measured; 0: it did not.

    One that has not computed a prompt yet is made to, through the router, which may choose another of the
    `prefill_workers` first.
    """
    if worker.prefill_tokens_per_second > 0:
        return worker.prefill_tokens_per_second
    length = max(1, min(PROMPT_TOKENS, worker.max_model_len - 2))
    why = f"{worker.worker_id} has not measured yet how fast it computes"
    typer.echo(f"{why}; sending a prompt of {length} random tokens", err=True)
    watch = asyncio.create_task(first_load(address_of(worker, access), _rate, access=access))
    try:
        for _ in range(2 * prefill_workers):
            prompt = [random.randrange(worker.vocab_size) for _ in range(length)]
            with contextlib.suppress(PdserveError):  # what it means for the rate is told by the rate
                await client.complete(prompt, model=worker.model, max_tokens=1, timeout=PROMPT_TIMEOUT)
            done, _ = await asyncio.wait({watch}, timeout=RATE_TIMEOUT)
            if done:
                return watch.result()
    except PdserveError as error:
        typer.echo(f"{worker.worker_id} cannot be asked: {error}", err=True)
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    return 0.0


def _rate(load: worker_pb2.WorkerLoad) -> float | None:
    return load.prefill_tokens_per_second or None


def _show(target: str, reports: Sequence[PairReport]) -> None:
    sizes = sorted({size for report in reports for size, _ in report.samples})
    columns = [*COLUMNS, *map(_binary, sizes)]
    rows = [table_row(report, sizes) for report in reports if not report.error]
    if rows:
        show_table(f"KV links of {target}, GB/s by frame size", columns, rows, numbers=range(4, len(columns)))
    for name, report in {report.prefill: report for report in reports}.items():
        made = f"{report.prefill_tokens_per_second:,.0f} tokens a second of {say_bytes(report.kv_token_bytes)} each"
        if report.needed:
            typer.echo(f"{name} makes {say_rate(report.needed)} of KV: {made}.")
    for report in reports:
        typer.echo(report.sentence())
        if report.degraded:
            typer.echo(f"! {report.prefill} to {report.decode} goes over {report.path}: {report.degraded}")


def table_row(report: PairReport, sizes: Sequence[int]) -> tuple[str, ...]:
    """The table's cells: COLUMNS, then GB/s for each of `sizes`; "-" is not measured."""
    rates = dict(report.samples)
    return (
        report.prefill,
        report.decode,
        report.transport,
        report.path,
        f"{1e3 * report.round_trip_seconds:.2f}",
        *(f"{rates[size] / 1e9:.2f}" if size in rates else "-" for size in sizes),
    )


def _binary(size: int) -> str:
    """A frame size for a column's head: "64 KiB", or bytes where it is no round one."""
    for unit, power in (("MiB", 20), ("KiB", 10)):
        if size % (1 << power) == 0:
            return f"{size >> power} {unit}"
    return f"{size} B"
