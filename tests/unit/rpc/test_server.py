"""The server bootstrap: bind, health, reflection, launcher, drain."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import urllib.request
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdserve.core.errors import ConfigError
from pdserve.rpc.channel import connect
from pdserve.rpc.launcher import Launcher
from pdserve.rpc.server import GrpcServer, Service, ServiceFailed, advertised_host, join_host_port
from pdserve.rpc.settings import ServiceSettings
from pdserve.telemetry.export import Metrics
from pdserve.telemetry.metrics import CollectorRegistry, count
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from pdserve.worker.service import WorkerServicer
from pdserve.worker.watch import WatchBoard

NAME = "pdserve.v1.WorkerService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def services() -> list[Service]:
    async def nothing() -> None: ...

    return [(worker_pb2_grpc.add_WorkerServiceServicer_to_server, WorkerServicer(WatchBoard(), nothing), NAME)]


async def health(channel: grpc.aio.Channel, name: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)).status)


async def test_health_is_live_once_bound_and_ready_when_told() -> None:
    async with GrpcServer(ServiceSettings(), services()) as server, connect(server.endpoint) as channel:
        assert await health(channel, "") == SERVING
        assert await health(channel, NAME) == NOT_SERVING
        await server.set_ready(True)
        assert await health(channel, NAME) == SERVING
        await server.set_ready(False)
        assert await health(channel, NAME) == NOT_SERVING


async def test_reflection_names_the_services() -> None:
    async with GrpcServer(ServiceSettings(), services()) as server, connect(server.endpoint) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(timeout=5)
        try:
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            answer = await call.read()
        finally:
            call.cancel()
        assert NAME in {service.name for service in answer.list_services_response.service}


async def test_a_taken_port_is_a_clear_error() -> None:
    async with GrpcServer(ServiceSettings(), services()) as server:
        port = int(server.endpoint.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}: address already in use"):
            async with GrpcServer(ServiceSettings(port=port), services()):
                pass


async def test_metrics_are_exported_from_binding_to_the_end() -> None:
    """Before a worker's model is loaded, too: that is when one wonders what it does."""
    registry = CollectorRegistry()
    count(registry, "things_total", "Things.").inc()
    settings = ServiceSettings(metrics_port=0)
    async with GrpcServer(settings, services(), Metrics(registry, "test")) as server:
        assert server.metrics_url is not None
        with await asyncio.to_thread(urllib.request.urlopen, server.metrics_url, timeout=5) as page:
            assert "pdserve_things_total 1.0" in page.read().decode()
        taken = ServiceSettings(metrics_port=int(server.metrics_url.rsplit(":", 1)[1].removesuffix("/metrics")))
        with pytest.raises(ConfigError, match=f"cannot serve metrics at 127.0.0.1:{taken.metrics_port}"):
            async with GrpcServer(taken, services(), Metrics(registry, "test")):
                pass
    with pytest.raises(OSError):
        await asyncio.to_thread(urllib.request.urlopen, server.metrics_url, timeout=5)
    async with GrpcServer(ServiceSettings(), services(), Metrics(registry, "test")) as quiet:
        assert quiet.metrics_url is None


async def test_drain_runs_callbacks_before_the_end_and_shows_not_serving() -> None:
    seen = []
    async with GrpcServer(ServiceSettings(), services()) as server, connect(server.endpoint) as channel:
        await server.set_ready(True)

        async def drain() -> None:
            seen.append(await health(channel, NAME))
            seen.append(await health(channel, ""))

        server.on_drain.append(drain)
        server.stop_requested.set()
        await asyncio.wait_for(server.run_until_stopped(), 5)
    assert seen == [NOT_SERVING, NOT_SERVING]


async def test_sigterm_drains_and_a_second_one_stops_at_once() -> None:
    async with GrpcServer(ServiceSettings(drain_seconds=60), services()) as server:
        draining, cancelled = asyncio.Event(), asyncio.Event()

        async def drain() -> None:
            draining.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        server.on_drain.append(drain)
        running = asyncio.create_task(server.run_until_stopped())
        await health_of_loop()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(draining.wait(), 5)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(running, 5)
        assert cancelled.is_set()


async def health_of_loop() -> None:
    """Let started tasks run up to their first wait."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_drain_is_bounded() -> None:
    async with GrpcServer(ServiceSettings(drain_seconds=0.05), services()) as server:
        server.on_drain.append(asyncio.Event().wait)  # type: ignore[arg-type]
        server.stop_requested.set()
        await asyncio.wait_for(server.run_until_stopped(), 5)


async def test_fail_skips_the_drain_and_raises() -> None:
    async with GrpcServer(ServiceSettings(), services()) as server:
        server.on_drain.append(asyncio.Event().wait)  # type: ignore[arg-type]
        server.fail("the engine died")
        with pytest.raises(ServiceFailed, match="the engine died"):
            await asyncio.wait_for(server.run_until_stopped(), 5)


async def test_the_launcher_hears_and_its_end_stops_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.rpc.launcher.die_with_parent", lambda: None)  # this process has no such launcher
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        async with GrpcServer(ServiceSettings(launcher_fd=theirs.detach()), services()) as server:
            assert json.loads(await reader.readline()) == {"event": "bound", "endpoint": server.endpoint}
            server.launcher.report("progress", stage="weights", done=0.5)
            assert json.loads(await reader.readline()) == {"event": "progress", "stage": "weights", "done": 0.5}
            await server.set_ready(True, worker_id="w")
            ready = json.loads(await reader.readline())
            assert ready == {"event": "ready", "endpoint": server.endpoint, "details": {"worker_id": "w"}}
            server.on_drain.append(asyncio.Event().wait)  # type: ignore[arg-type]
            writer.close()
            await asyncio.wait_for(server.run_until_stopped(), 5)
    finally:
        writer.close()
        await writer.wait_closed()


async def test_the_launcher_hears_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.rpc.launcher.die_with_parent", lambda: None)
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    with pytest.raises(ServiceFailed):
        async with GrpcServer(ServiceSettings(launcher_fd=theirs.detach()), services()) as server:
            server.fail("no such folder")
            await server.run_until_stopped()
    lines = (await reader.read()).splitlines()
    assert json.loads(lines[-1]) == {"event": "failed", "error": "no such folder"}
    writer.close()
    await writer.wait_closed()


async def test_without_a_launcher_reports_go_nowhere() -> None:
    launcher = Launcher(None)
    await launcher.start()
    launcher.report("ready")
    assert not launcher.gone.is_set()
    await launcher.close()


async def test_channels_to_one_target_have_connections_of_their_own() -> None:
    peers: set[str] = set()

    class Watch(worker_pb2_grpc.WorkerServiceServicer):
        async def Drain(self, request: worker_pb2.DrainRequest, context: Any) -> worker_pb2.DrainResponse:
            peers.add(context.peer())
            return worker_pb2.DrainResponse()

        Watch = OpenLink = None  # type: ignore[assignment]

    added: list[Service] = [(worker_pb2_grpc.add_WorkerServiceServicer_to_server, Watch(), NAME)]
    async with GrpcServer(ServiceSettings(), added) as server:
        for _ in range(2):
            async with connect(server.endpoint) as channel:
                stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
                await stub.Drain(worker_pb2.DrainRequest(), timeout=5)
    assert len(peers) == 2


def test_addresses() -> None:
    assert join_host_port("::1", 5) == "[::1]:5" and join_host_port("h", 5) == "h:5"
    assert advertised_host("10.0.0.1") == "10.0.0.1" and advertised_host("0.0.0.0") == socket.gethostname()
