"""`pdserve probe speed`: how long a fleet's steps take, as its workers learned it; `pdserve simulate` can go by it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.console import DEFAULT_TARGET, Target, run, show_table
from pdserve.cli.reach import DEFAULT_CONNECT_TIMEOUT, ConnectTimeout, InternalSecretFile, own_access, router
from pdserve.cli.watch_worker import address_of, first_load
from pdserve.core.errors import PdserveError, Unavailable
from pdserve.policy.estimate import Speed
from pdserve.rpc.access import PLAIN, Access

if TYPE_CHECKING:
    from pdserve.client import Client, FleetWorker

REQUEST_TIMEOUT = 120.0  # seconds
REPORT_TIMEOUT = 5.0  # until a worker has told what it learned; it speaks at least every second
# Of the requests that workers learn from: tokens of the shortest prompt and of answers, and how many are at once.
SHORTEST, ANSWER_TOKENS, TOGETHER = 16, 16, 4
COLUMNS = ("role", "worker", "a step", "1k of prompt", "64k squares", "an answer", "1k of context", "learned from")


@dataclass(frozen=True, slots=True)
class SpeedReport:
    """One worker's."""

    worker_id: str
    role: str
    model: str
    node: str
    device: str
    speed: Speed


def speed(
    target: Target = DEFAULT_TARGET,
    requests: Annotated[
        int, typer.Option(min=0, help="Send so many prompts of random tokens first, for workers to learn from.")
    ] = 0,
    prompt_tokens: Annotated[
        int, typer.Option(min=SHORTEST, help="The longest of them; what long prompts take shows in long ones only.")
    ] = 512,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a worker, a line each.")] = False,
    connect_timeout: ConnectTimeout = DEFAULT_CONNECT_TIMEOUT,
    internal_secret_file: InternalSecretFile = None,
) -> None:
    """Show what each worker learned of how long its steps take. `--json` is what `pdserve simulate --measured` reads.

    Workers learn from whatever they serve: from an idle suite there is nothing to learn. Ends with 1 where no worker
    knows what prompts take, or none what answers do.
    """
    reports: list[SpeedReport] = []

    async def main() -> None:
        reports.extend(await probe(target, requests, prompt_tokens, connect_timeout, own_access(internal_secret_file)))

    run(main())
    if as_json:
        for report in reports:
            typer.echo(json.dumps(dataclasses.asdict(report)))
    else:
        show_table(
            f"what steps take on the workers of {target}",
            COLUMNS,
            map(row, reports),
            numbers=range(2, len(COLUMNS) - 1),
        )
    missing = [
        kind
        for kind, known in (
            ("prompts", any(report.speed.knows_prompts for report in reports)),
            ("answers", any(report.speed.knows_answers for report in reports)),
        )
        if not known
    ]
    if missing:
        typer.echo(f"pdserve: no worker knows yet what {' and '.join(missing)} take; try --requests 50", err=True)
        raise typer.Exit(1)


async def probe(
    target: str,
    requests: int,
    prompt_tokens: int,
    connect_timeout: float = DEFAULT_CONNECT_TIMEOUT,
    access: Access = PLAIN,
) -> list[SpeedReport]:
    """What the workers of the router at `target` know, after `requests` of up to `prompt_tokens` for each of its
    models. Raises Unavailable."""
    async with router(target, connect_timeout) as client:
        fleet = await _workers(client)
        for model in dict.fromkeys(worker.model for worker in fleet) if requests else ():
            await _teach(client, next(worker for worker in fleet if worker.model == model), requests, prompt_tokens)
    # Asked of the workers themselves: what the router heard last may be a second old.
    speeds = await asyncio.gather(*(_latest(worker, access) for worker in fleet))
    return [
        SpeedReport(worker.worker_id, worker.role, worker.model, worker.node, worker.device, known)
        for worker, known in zip(fleet, speeds, strict=True)
    ]


def row(report: SpeedReport) -> tuple[str, ...]:
    """The table's cells, in the order of COLUMNS. "-" is not known."""
    speed = report.speed
    prompts = (speed.token * 1000, speed.square * (1 << 16)) if speed.knows_prompts else (None, None)
    answers = (speed.answer, speed.read * 1000) if speed.knows_answers else (None, None)
    step = speed.step if speed.knows_prompts or speed.knows_answers else None
    learned = f"{speed.prompts} steps with prompts, {speed.answers} with answers"
    times = ("-" if value is None else f"{1e3 * value:.3f} ms" for value in (step, *prompts, *answers))
    return (report.role, report.worker_id, *times, learned)


async def _workers(client: Client) -> Sequence[FleetWorker]:
    fleet = [worker for worker in await client.fleet() if worker.connected and worker.role in ("prefill", "decode")]
    if not fleet:
        raise Unavailable("this fleet has no prefill or decode worker now")
    return sorted(fleet, key=lambda worker: (worker.role != "prefill", worker.worker_id))


async def _teach(client: Client, worker: FleetWorker, requests: int, prompt_tokens: int) -> None:
    """Have prompts of many lengths served, a few at once, so that a line can be laid through what they take.

    Raises what a request ends with.
    """
    longest = max(1, min(prompt_tokens, worker.max_model_len - ANSWER_TOKENS))
    shortest = min(SHORTEST, longest)
    rng, slots = random.Random(), asyncio.Semaphore(TOGETHER)

    async def ask(number: int) -> None:
        share = number / max(1, requests - 1)
        length = round(shortest * (longest / shortest) ** share)
        prompt = [rng.randrange(worker.vocab_size) for _ in range(length)]
        async with slots:
            await client.complete(
                prompt, model=worker.model, max_tokens=ANSWER_TOKENS, ignore_eos=True, timeout=REQUEST_TIMEOUT
            )

    await asyncio.gather(*map(ask, rng.sample(range(requests), requests)))


async def _latest(worker: FleetWorker, access: Access) -> Speed:
    """What the worker says now; what the router has of it, and why, where it does not answer in time."""
    from pdserve.rpc.convert import speed_from_proto

    try:
        return await first_load(
            address_of(worker, access), lambda load: speed_from_proto(load.speed), REPORT_TIMEOUT, access
        )
    except PdserveError as error:
        typer.echo(f"{worker.worker_id} cannot be asked, so this is what the router heard last: {error}", err=True)
        return worker.speed
