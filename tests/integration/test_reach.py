"""Commands that ask a router which is not up yet: what they wait for, and for how long."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pdserve.cli.reach import router
from pdserve.client import NO_RETRIES
from pdserve.core.errors import Unavailable
from pdserve.rpc.channel import SERVER_OPTIONS
from pdserve.v1 import inference_pb2_grpc
from tests.integration.scripted_router import ScriptedRouter

SERVICE = "pdserve.v1.InferenceService"
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


class Health(health.aio.HealthServicer):
    """`asked` is set once somebody follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()

    async def Watch(self, request: Any, context: Any) -> None:
        self.asked.set()
        await super().Watch(request, context)


@asynccontextmanager
async def serving(port: int, health: Health | None = None) -> AsyncIterator[str]:
    """A router at `port`, 0: any free one; without `health` it knows nothing of health checks."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(ScriptedRouter(), server)
    if health is not None:
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(0)


async def served(target: str, timeout: float, *, serving: bool = False) -> list[str]:
    async with router(target, timeout, serving=serving, retry=NO_RETRIES) as client:
        return [model.name for model in await client.models()]


@pytest.fixture
def port() -> int:
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_a_router_that_is_not_up_yet_is_waited_for(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = asyncio.Event()
    connect = asyncio.open_connection

    async def open_connection(*where: Any, **options: Any) -> Any:
        try:
            return await connect(*where, **options)
        except OSError:
            tried.set()
            raise

    monkeypatch.setattr("pdserve.cli.reach.asyncio.open_connection", open_connection)
    monkeypatch.setattr("pdserve.cli.reach.SAY_AFTER", 0.0)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(served(f"127.0.0.1:{port}", 30.0))
        await tried.wait()
        async with serving(port) as target:
            assert await asking == ["tiny"]
    assert capsys.readouterr().err == f"waiting for {target} ...\n"


async def test_one_that_starts_is_waited_for_by_who_needs_workers(capsys: pytest.CaptureFixture[str]) -> None:
    health = Health()
    await health.set(SERVICE, NOT_SERVING)
    async with asyncio.timeout(30), serving(0, health) as target, asyncio.TaskGroup() as tasks:
        assert await served(target, 30.0) == ["tiny"] and not health.asked.is_set()
        asking = tasks.create_task(served(target, 30.0, serving=True))
        await health.asked.wait()
        assert not asking.done()
        await health.set(SERVICE, SERVING)
        assert await asking == ["tiny"]


async def test_nobody_is_waited_for_longer_than_told(port: int) -> None:
    """The call is made then, and says what is wrong."""
    health = Health()
    await health.set(SERVICE, NOT_SERVING)
    async with asyncio.timeout(30), serving(0, health) as target:
        assert await served(target, 0.1, serving=True) == ["tiny"]
        with pytest.raises(Unavailable):
            await served(f"127.0.0.1:{port}", 0.1)


async def test_what_is_there_at_once_is_not_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor is one waited for that has no health checks."""
    async with asyncio.timeout(30), serving(0) as target:
        assert await served(target, 30.0, serving=True) == ["tiny"]
    assert capsys.readouterr().err == ""


async def test_a_name_that_means_nothing_is_not_waited_for() -> None:
    async with asyncio.timeout(30):
        with pytest.raises(Unavailable):
            await served("nobody.invalid:1", 60.0)
