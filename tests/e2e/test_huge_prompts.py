"""Prompts of megabytes, many at a time: refused before anything is computed, and their memory comes back."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from benchmarks.processes import resident_bytes
from pdserve.client import NO_RETRIES, Client
from pdserve.core.errors import InvalidRequest, NoCapacity, PdserveError
from pdserve.launch import ModelPart
from pdserve.testing import Cluster
from tests.integration.raw_http import ask
from tests.integration.suites import complete_over_http, prompt, serve
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow

MIB = 1 << 20
AT_ONCE, WAVES = 4, 2
TAKEN = 16 * MIB  # what router and gateway take of one request
# Below the router's limit for a request, above it, and above what is read of a message at all.
SIZES = {15 * MIB: InvalidRequest, 17 * MIB: InvalidRequest, 33 * MIB: NoCapacity}
KEPT = 128 * MIB  # of a process's memory that may be left over: as many as there are at a time, and not all of them
WITHIN = 60.0  # seconds for an answer beside them, on a machine that is busy


async def wave(cluster: Cluster, size: int, refusal: type[PdserveError]) -> None:
    """AT_ONCE of that size over gRPC, each by a client of its own, and as many over HTTP; and an answer beside them."""

    async def over_grpc() -> None:
        async with Client(cluster.endpoint, retry=NO_RETRIES) as client:
            with pytest.raises(refusal):
                await client.complete("x" * size, max_tokens=1, timeout=WITHIN)

    async def over_http() -> None:
        body = {"model": "tiny", "prompt": "x" * size, "max_tokens": 1}
        try:
            reply = await ask(f"{cluster.http}/v1/completions", body)
        except ConnectionError:  # closed while most of the body was on its way
            assert size > TAKEN
        else:
            assert reply.status == (400 if size <= TAKEN else 413), reply.body[:200]

    async def bystander() -> None:
        async with asyncio.timeout(WITHIN):
            await cluster.client.complete(prompt(20), max_tokens=4, ignore_eos=True)
            await complete_over_http(cluster, prompt(20), 4)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(over_grpc())
            tasks.create_task(over_http())
        tasks.create_task(bystander())


async def test_huge_prompts_are_refused_and_their_memory_comes_back(tmp_path: Path) -> None:
    part = ModelPart(make_tiny_model(tmp_path / "model"), "tiny", colocated=1)
    async with serve(tmp_path / "logs", part, gateways=1) as cluster:
        assert cluster.suite.router is not None
        pids = {"router": cluster.suite.router.pid, "gateway": cluster.suite.gateways[0].pid}
        await wave(cluster, 2000, InvalidRequest)  # too long for the model, too: warm-up
        before = {name: resident_bytes(pid) for name, pid in pids.items()}
        for _ in range(WAVES):
            for size, refusal in SIZES.items():
                await wave(cluster, size, refusal)
        await cluster.assert_all_free()
        grown: dict[str, int] = {}
        until = time.monotonic() + WITHIN  # the collector runs some seconds after the last one
        while (not grown or max(grown.values()) > KEPT) and time.monotonic() < until:
            await cluster.client.complete(prompt(20), max_tokens=4, ignore_eos=True)
            grown = {name: resident_bytes(pid) - before[name] for name, pid in pids.items()}
        print(f"MiB that are left over: { ({name: size // MIB for name, size in grown.items()}) }")
        assert max(grown.values()) <= KEPT
