"""An engine that is stuck while its worker lives: health says so, its answers go on elsewhere, and it comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client import Finish, Output
from pdserve.launch import ModelPart, Service
from pdserve.rpc.channel import connect
from pdserve.testing import Cluster
from tests.integration.suites import engine_of, prompt, serve
from tests.tiny_models import make_tiny_model

OPTIONS: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True, "temperature": 0.7, "seed": 5}

STALL = 2.0  # seconds; a busy machine's hiccups are shorter


async def until_health(worker: Service, serving: bool) -> None:
    """Wait for what the worker's health says."""
    async with connect(worker.endpoint) as channel:
        request = health_pb2.HealthCheckRequest(service="pdserve.v1.DecodeService")
        call = health_pb2_grpc.HealthStub(channel).Watch(request)
        async with asyncio.timeout(30):
            async for response in call:
                if (response.status == health_pb2.HealthCheckResponse.SERVING) == serving:
                    break
        call.cancel()


async def until_connected(cluster: Cluster, count: int) -> None:
    async with asyncio.timeout(30):
        while sum(worker.connected for worker in await cluster.client.fleet()) != count:
            pass


async def busy_decoder(cluster: Cluster) -> str:
    """The decode worker that has said it is at work; empty where none has yet."""
    fleet = await cluster.client.fleet()
    return next((worker.worker_id for worker in fleet if worker.running and worker.role == "decode"), "")


async def test_a_stalled_engine_turns_its_worker_red_and_costs_a_gap(tmp_path: Path) -> None:
    part = ModelPart(make_tiny_model(tmp_path / "model", max_position_embeddings=8192), "tiny", prefill=1, decode=2)
    flags = {f"decode-{index}": {"engine-stall-seconds": STALL} for index in range(2)}
    async with serve(tmp_path / "logs", part, per_worker=flags) as cluster:
        expected = await cluster.client.complete(prompt(40), **OPTIONS)
        tokens, finish, stuck = list[int](), None, ""
        async with cluster.client.generate(prompt(40), **OPTIONS) as events:
            async for event in events:
                if isinstance(event, Output):
                    tokens += event.token_ids
                    if not stuck and (stuck := await busy_decoder(cluster)):
                        os.kill(engine_of(cluster.workers[stuck]), signal.SIGSTOP)
                elif isinstance(event, Finish):
                    finish = event
        worker = cluster.workers[stuck]
        assert tokens == expected.token_ids and finish is not None
        assert finish.usage.replays >= 1 and finish.usage.decode_worker != stuck
        await until_health(worker, serving=False)
        await until_connected(cluster, 2)
        assert (await cluster.client.complete(prompt(40), **OPTIONS)).token_ids == expected.token_ids
        os.kill(engine_of(worker), signal.SIGCONT)
        await until_health(worker, serving=True)
        await until_connected(cluster, 3)
        await cluster.assert_all_free()
    log = (tmp_path / "logs" / f"{stuck}.log").read_text()
    assert f"the engine has not answered for {STALL:g} s" in log and "engine_answers_again" in log
