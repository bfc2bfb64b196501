"""Is anything lost while processes die? Every answer must come whole, and as an undisturbed run gives it.

2 routers, 2 prefill workers, 3 decode workers and a prefix cache serve 30 requests at a time, greedy and seeded, while
a seeded monkey kills (SIGKILL), stops (SIGSTOP, 5 s) and terminates (SIGTERM) processes at random; whoever died is
started again, and one of each role stays up. Some clients leave in the middle. In the end every block has to be free.

An answer that differs is asked for again, undisturbed and among others: float32 sums depend on who shares a batch, so
that a near tie between two tokens may fall either way. What never comes again that way is counted as wrong.

usage: python benchmarks/chaos.py [--seconds S] [--seed N] [--pause S]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

IN_FLIGHT, DEADLINE = 30, 120.0
KINDS = 40  # different requests
LEAVE = 0.1  # share of the requests that their clients leave
AGAIN = 12  # times that a different answer is asked for again
BACK_WITHIN = 10.0  # seconds for one that died to serve again; told, and no failure: it is what starting takes here
PATIENCE = 15.0  # seconds for the last block to be free


@dataclass
class Tally:
    """What became of the requests."""

    completed: int = 0
    left: int = 0
    failed: list[str] = field(default_factory=list)
    different: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    retries: int = 0
    replays: int = 0


def request(kind: int) -> tuple[list[int], dict[str, Any]]:
    """Prompt and options of one of KINDS: half greedy, half seeded; some share a prefix, some have penalties."""
    rng = random.Random(kind)
    shared = [(kind % 4 * 17 + index * 7) % 250 for index in range(96)]
    tokens = shared[: rng.choice((0, 48, 96))] + [rng.randrange(250) for _ in range(rng.randrange(8, 160))]
    options: dict[str, Any] = {"max_tokens": rng.randrange(20, 160), "ignore_eos": True, "temperature": 0.0}
    if kind % 2:
        options |= {"temperature": 0.8, "seed": kind, "top_p": 0.95, "frequency_penalty": rng.choice((0.0, 0.5))}
    return tokens, options


async def undisturbed(routers: list[str]) -> tuple[list[tuple[int, ...]], list[float]]:
    """Every answer, and the times to first tokens with IN_FLIGHT at a time."""
    from pdserve.client import Client

    tally = Tally()
    async with Client(routers) as client:
        answers = [
            tuple((await client.complete(tokens, **options)).token_ids)
            for tokens, options in map(request, range(KINDS))
        ]
        lanes = [
            lane(client, random.Random(-1 - index), answers, tally, time.monotonic() + 10.0)
            for index in range(IN_FLIGHT)
        ]
        await asyncio.gather(*lanes)
    assert not tally.failed, tally.failed[0]
    return answers, tally.ttft


async def lane(client: Any, chance: random.Random, expected: list[tuple[int, ...]], tally: Tally, until: float) -> None:
    """One request after the other."""
    from pdserve.core.errors import PdserveError

    while time.monotonic() < until:
        kind = chance.randrange(KINDS)
        leaves = chance.randrange(1, 20) if chance.random() < LEAVE else None
        began = time.monotonic()
        try:
            tokens = await ask(client, kind, leaves, tally, began)
        except (PdserveError, TimeoutError) as error:
            tally.failed.append(f"{time.monotonic() - began:.1f} s: {type(error).__name__}: {error}")
            continue
        if leaves is not None:
            tally.left += 1
        else:
            tally.completed += 1
            if tokens != expected[kind]:
                tally.different.append((kind, tokens))


async def ask(client: Any, kind: int, leaves: int | None, tally: Tally, began: float) -> tuple[int, ...]:
    """The answer's tokens; those so far where the client leaves after so many."""
    from pdserve.client import Finish, Output

    prompt, options = request(kind)
    tokens: list[int] = []
    async with client.generate(prompt, timeout=DEADLINE, **options) as events:
        async for event in events:
            if isinstance(event, Output):
                if not tokens:
                    tally.ttft.append(time.monotonic() - began)
                tokens += event.token_ids
                if leaves is not None and len(tokens) >= leaves:
                    break
            elif isinstance(event, Finish):
                tally.replays += event.usage.replays
    return tuple(tokens)


async def wrong(routers: list[str], tally: Tally) -> int:
    """How many of the different answers no undisturbed run gives, however often it is asked."""
    from pdserve.client import Client

    found = 0
    async with Client(routers) as client:
        for kind, tokens in tally.different:
            prompt, options = request(kind)
            others = [request((kind + other) % KINDS) for other in range(1, AGAIN)]
            asked = [(prompt, options)] * AGAIN + others
            answers = await asyncio.gather(*(client.complete(tokens_, **options_) for tokens_, options_ in asked))
            found += tokens not in {tuple(answer.token_ids) for answer in answers[:AGAIN]}
    return found


async def monkey(fleet: Any, chance: random.Random, until: float, pause: float) -> Counter[str]:
    """Harm somebody every `pause` seconds or so; returns how often what was done."""
    done: Counter[str] = Counter()
    while time.monotonic() < until:
        await asyncio.sleep(chance.uniform(0.5, 1.5) * pause)
        if what := await fleet.harm(chance):
            print(what, file=sys.stderr, flush=True)
            done[what.split()[0]] += 1
    return done


async def leaked(workers: list[str]) -> int:
    """Blocks that are owned or reserved on a worker though nobody asks for anything."""
    from pdserve.testing import wait_load

    async def of(endpoint: str) -> int:
        last = None

        def free(load: Any) -> bool:
            nonlocal last
            last = load.owned_blocks + load.reserved_blocks
            return not last

        try:
            await wait_load(endpoint, free, PATIENCE)
        except AssertionError as error:  # not free in time, silent, or blocks that do not add up
            print(error, file=sys.stderr)
            return last or 1
        return 0

    return sum(await asyncio.gather(*map(of, workers)))


async def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from benchmarks.chaos_fleet import ChaosFleet
    from pdserve.client import Client, RetryPolicy
    from pdserve.telemetry.logs import setup_logs
    from tests.tiny_models import make_tiny_model

    setup_logs("chaos", "warning")
    tally, chance = Tally(), random.Random(args.seed)
    model = make_tiny_model(folder / "model")
    async with ChaosFleet(model, folder) as fleet:
        expected, before = await undisturbed(fleet.routers)
        until = time.monotonic() + args.seconds

        def retried(retry: Any) -> None:
            tally.retries += 1

        policy = RetryPolicy(max_retries=100, initial_backoff=0.1, max_backoff=1.0)
        async with Client(fleet.routers, retry=policy, on_retry=retried) as client:
            lanes = [
                lane(client, random.Random(f"{args.seed} {index}"), expected, tally, until)
                for index in range(IN_FLIGHT)
            ]
            monkeying = asyncio.create_task(monkey(fleet, chance, until, args.pause))
            await asyncio.gather(*lanes)
            harms = await monkeying
        await fleet.healed()
        unfree = await leaked(fleet.workers)
        lost = await wrong(fleet.routers, tally)
    away = fleet.away or [0.0]
    for failure in tally.failed[:20]:
        print("failed after", failure, file=sys.stderr)
    return {
        "benchmark": "chaos",
        "seed": args.seed,
        "seconds": args.seconds,
        "requests": tally.completed + tally.left + len(tally.failed),
        "completed": tally.completed,
        "left_by_client": tally.left,
        "failed": len(tally.failed),
        "wrong": lost,
        "near_ties": len(tally.different) - lost,
        "leaked_blocks": unfree,
        "kills": harms["kill"],
        "stops": harms["stop"],
        "terms": harms["terminate"],
        "away_s": {"median": round(statistics.median(away), 1), "longest": round(max(away), 1)},
        "back_in_time": max(away) <= BACK_WITHIN,
        "retries": tally.retries,
        "replays": tally.replays,
        "added_ttft_p99_ms": round(1e3 * (_p99(tally.ttft) - _p99(before)), 1),
    }


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between two harms, about")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="folder for the services' logs, which is kept")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
        result = asyncio.run(run(args, args.logs))
    else:
        with tempfile.TemporaryDirectory() as name:
            result = asyncio.run(run(args, Path(name)))
    print(json.dumps(result))
    if result["failed"] or result["wrong"] or result["leaked_blocks"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
