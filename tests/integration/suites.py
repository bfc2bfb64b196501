"""Whole suites of real processes, for tests: what to start, and that nothing is owed at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pdserve.client import Client
from pdserve.launch import Machine, ModelPart, Suite, WorkerOptions, plan_suite
from pdserve.rpc.channel import connect
from pdserve.v1 import worker_pb2
from pdserve.v1.worker_pb2_grpc import WorkerServiceStub

DEADLINE = 60.0
CHUNK = 64
BLOCK = 16
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "block_size": BLOCK, "max_num_batched_tokens": CHUNK,
    "kv_cache_memory": 16 << 20,
}  # fmt: skip


class Running:
    """A suite that runs, and a client of it."""

    def __init__(self, suite: Suite, client: Client) -> None:
        self.suite, self.client = suite, client

    async def all_free(self) -> None:
        """Wait until no worker holds a block for anybody: every one is free or cached. Fails after the deadline."""
        await asyncio.gather(*(all_free(service.endpoint) for service in self.suite.workers))


@asynccontextmanager
async def serve(
    logs: Path,
    *parts: ModelPart,
    prefix_caches: int = 0,
    per_worker: Mapping[str, Mapping[str, object]] | None = None,
    **options: Any,
) -> AsyncIterator[Running]:
    """Start `parts` as processes on loopback; stop all of them at the end."""
    workers = WorkerOptions(**{**OPTIONS, **options})
    plan = plan_suite(parts, Machine.here(), workers, prefix_caches=prefix_caches, per_worker=per_worker)
    async with Suite(plan, log_folder=logs, start_timeout=DEADLINE * 2) as suite, Client(suite.endpoint) as client:
        yield Running(suite, client)


async def all_free(endpoint: str) -> None:
    """Watch one worker until its blocks are all free or cached."""
    await watch(endpoint, lambda load: not load.owned_blocks + load.reserved_blocks)


async def watch(endpoint: str, until: Callable[[worker_pb2.WorkerLoad], bool]) -> None:
    """Follow one worker's load until `until` holds. Fails after the deadline, or when its blocks do not add up."""
    load = worker_pb2.WorkerLoad()
    channel = connect(endpoint)
    call = WorkerServiceStub(channel).Watch(
        worker_pb2.WatchRequest(protocol=worker_pb2.VersionRange(min=1, max=1)), timeout=DEADLINE
    )
    try:
        async with asyncio.timeout(DEADLINE):
            total = 0
            async for event in call:
                if event.HasField("snapshot"):
                    total = event.snapshot.total_blocks
                    continue
                load = event.delta.load
                blocks = (load.free_blocks, load.cached_blocks, load.owned_blocks, load.reserved_blocks)
                assert sum(blocks) == total or not total
                if until(load):
                    return
    except TimeoutError:
        raise AssertionError(f"{endpoint} is still not as it should be: {load}") from None
    finally:
        call.cancel()
        await channel.close()


def prompt(length: int, seed: int = 0, vocab: int = 250) -> list[int]:
    """Token ids that differ by seed from the first one on."""
    return [(seed * 101 + index * 37 + (index * index) % 11 + 3) % vocab for index in range(length)]
