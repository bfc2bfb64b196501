"""Does memory grow? Everything that clients do, at speed, for an hour; each process' resident memory before and after.

A router, a gateway, a prefill and a decode worker and a prefix cache with a tiny model; LANES clients, each one request
after the other: token ids, texts and chats, over gRPC and HTTP, streamed and whole, under thousands of tenants and
sessions; some leave, some read slowly, some ask for what cannot be or would come too late. Caches are small, so that
they are full early. A process' memory is the median of its samples in the minute before it is compared: when the load
has run for five minutes, and at the end.

usage: python benchmarks/memory.py [--minutes M] [--settle S] [--lanes N] [--seed N]
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
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

LANES = 24
EVERY = 5.0  # seconds between two samples
WINDOW = 60.0  # seconds of samples that are one figure
ALLOWED = 0.05  # growth of a process that holds
WINDOW_TOKENS = 1024  # the model's
PREFIXES = 8  # different beginnings that prompts share
MIB = 1 << 20
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "threads": 1, "block_size": 16, "max_num_batched_tokens": 256, "max_num_seqs": 64,
    "kv_cache_memory": 32 * MIB, "log_level": "warning",
}  # fmt: skip


class Load:
    """Requests of every kind, and what became of them."""

    def __init__(self, client: Any, hasty: Any, http: str) -> None:
        """`hasty` does not try again where it is refused."""
        self.done: Counter[str] = Counter()
        self.failed: list[str] = []
        self._client, self._hasty = client, hasty
        self._host, self._port = http.removeprefix("http://").rsplit(":", 1)
        self._kinds: list[tuple[str, int, Callable[[random.Random], Awaitable[None]]]] = [
            ("tokens", 6, self._tokens),
            ("chat", 3, self._chat),
            ("http", 3, partial(self._http, stream=False)),
            ("http stream", 3, partial(self._http, stream=True)),
            ("left", 2, self._left),
            ("read slowly", 1, self._slowly),
            ("too long", 1, self._too_long),
            ("too late", 1, self._too_late),
        ]

    async def lane(self, chance: random.Random, until: float) -> None:
        """One request after the other."""
        names, weights, _ = zip(*self._kinds, strict=True)
        calls = {name: call for name, _, call in self._kinds}
        while time.monotonic() < until:
            name = chance.choices(names, weights)[0]
            try:
                async with asyncio.timeout(120.0):
                    await calls[name](chance)
            except Exception as error:
                self.failed.append(f"{name}: {error!r}")
            else:
                self.done[name] += 1

    def _prompt(self, chance: random.Random) -> list[int]:
        prefix = chance.randrange(PREFIXES)
        shared = [(prefix * 17 + index * 7) % 250 for index in range(chance.choice((0, 64, 128)))]
        return shared + [chance.randrange(250) for _ in range(chance.randrange(8, 300))]

    def _options(self, chance: random.Random) -> dict[str, Any]:
        options: dict[str, Any] = {"max_tokens": chance.randrange(8, 120), "tenant": f"tenant {chance.randrange(8192)}"}
        if chance.random() < 0.5:
            options["session_id"] = f"session {chance.randrange(100_000)}"
        if chance.random() < 0.3:
            options |= {"seed": chance.randrange(1000), "temperature": 0.8, "frequency_penalty": 0.3}
        return options

    async def _tokens(self, chance: random.Random) -> None:
        await self._client.complete(self._prompt(chance), **self._options(chance))

    async def _chat(self, chance: random.Random) -> None:
        text = "".join(chance.choices("abcdefgh \n", k=chance.randrange(1, 200)))
        await self._client.complete([{"role": "user", "content": text}], **self._options(chance))

    async def _left(self, chance: random.Random) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(chance.random() * 0.5):
                await self._client.complete(self._prompt(chance), **self._options(chance))

    async def _slowly(self, chance: random.Random) -> None:
        async for _ in self._client.generate(self._prompt(chance), **self._options(chance)):
            await asyncio.sleep(0.1)  # what makes this reader slow

    async def _too_long(self, chance: random.Random) -> None:
        from pdserve.core.errors import InvalidRequest

        with suppress(InvalidRequest):
            await self._client.complete([7] * chance.randrange(WINDOW_TOKENS, 500_000), max_tokens=8)
            raise AssertionError("it was taken")

    async def _too_late(self, chance: random.Random) -> None:
        from pdserve.core.errors import NoCapacity, TooLate

        with suppress(TooLate, NoCapacity):
            await self._hasty.complete(self._prompt(chance), slo_ttft_ms=20.0, **self._options(chance))

    async def _http(self, chance: random.Random, *, stream: bool) -> None:
        body = {"model": "tiny", "prompt": self._prompt(chance), "max_tokens": chance.randrange(8, 120)}
        data = json.dumps({**body, "stream": stream}).encode()
        reader, writer = await asyncio.open_connection(self._host, int(self._port))
        try:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            head += f"x-tenant-id: tenant {chance.randrange(8192)}\r\nconnection: close\r\n"
            writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            answer = await reader.read(-1)
        finally:
            writer.close()
        if not answer.startswith(b"HTTP/1.1 200"):
            raise AssertionError(answer[:200])


async def sample(pids: dict[str, int], samples: dict[str, list[tuple[float, int]]], until: float) -> None:
    """The memory of each process, every so often."""
    from benchmarks.processes import resident_bytes

    while (now := time.monotonic()) < until:
        for name, pid in pids.items():
            samples.setdefault(name, []).append((now, resident_bytes(pid)))
        await asyncio.sleep(min(EVERY, max(0.0, until - now)))


def settled(samples: list[tuple[float, int]], end: float, window: float) -> int:
    """The median of what was seen in the window before `end`."""
    return int(statistics.median(size for at, size in samples if end - window <= at <= end))


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from benchmarks.processes import cpu_seconds, processes
    from pdserve.client import Client
    from pdserve.launch import ModelPart
    from pdserve.telemetry.logs import setup_logs
    from pdserve.testing import Cluster
    from tests.tiny_models import make_tiny_model

    setup_logs("memory", "warning")
    model = make_tiny_model(folder / "tiny", max_position_embeddings=WINDOW_TOKENS)
    part = ModelPart(model, "tiny", prefill=1, decode=1)
    samples: dict[str, list[tuple[float, int]]] = {}
    options = {"per_worker": {"prefix-cache-0": {"capacity": 64 * MIB}}, **OPTIONS}
    async with (
        Cluster([part], prefix_caches=1, gateways=1, log_folder=args.logs or folder / "logs", **options) as cluster,
        Client(cluster.endpoint) as client,
    ):
        pids = processes(cluster.suite)
        load = Load(client, cluster.client, cluster.http)
        began = time.monotonic()
        end = began + 60 * args.minutes
        used = {name: cpu_seconds(pid) for name, pid in pids.items()}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sample(pids, samples, end))
            tasks.create_task(tell(load, samples, began, end))
            for index in range(args.lanes):
                tasks.create_task(load.lane(random.Random(f"{args.seed} {index}"), end))
        used = {name: cpu_seconds(pid) - used[name] for name, pid in pids.items()}
        await cluster.assert_all_free()
    window = min(WINDOW, args.settle / 2)
    before = {name: settled(seen, began + args.settle, window) for name, seen in samples.items()}
    after = {name: settled(seen, end, window) for name, seen in samples.items()}
    growth = {name: round(after[name] / before[name] - 1, 4) for name in samples}
    for failure in load.failed[:20]:
        print("failed:", failure, file=sys.stderr)
    return {
        "benchmark": "memory",
        "minutes": args.minutes,
        "settled_after_s": args.settle,
        "requests": dict(load.done),
        "requests_s": round(load.done.total() / (end - began), 1),
        "failed": len(load.failed),
        "cpu_share": {name: round(seconds / (end - began), 2) for name, seconds in used.items()},
        "rss_settled_mib": {name: round(size / MIB, 1) for name, size in before.items()},
        "rss_end_mib": {name: round(size / MIB, 1) for name, size in after.items()},
        "growth": growth,
        "holds": not load.failed and all(share <= ALLOWED for share in growth.values()),
    }


async def tell(load: Load, samples: dict[str, list[tuple[float, int]]], began: float, until: float) -> None:
    """Say every minute how far it is."""
    while (left := until - time.monotonic()) > 0:
        await asyncio.sleep(min(60.0, left))
        sizes = {name: round(seen[-1][1] / MIB, 1) for name, seen in samples.items()}
        minutes = (time.monotonic() - began) / 60
        print(f"{minutes:.0f} min: {load.done.total()} requests, {len(load.failed)} failed, MiB {sizes}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--settle", type=float, default=300.0, help="seconds after which memory must not grow any more")
    parser.add_argument("--lanes", type=int, default=LANES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="folder for the services' logs, which is kept")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    with tempfile.TemporaryDirectory() as name:
        result = asyncio.run(measure(args, Path(name)))
    print(json.dumps(result))
    if not result["holds"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
