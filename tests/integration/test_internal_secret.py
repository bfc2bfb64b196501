"""Inside a fleet, services answer those alone that show its secret: every RPC of every internal port."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

import pdserve.v1
from pdserve.cli import probe_speed
from pdserve.launch import ModelPart
from pdserve.router.config import RouterSettings
from pdserve.router.fleet import Fleet
from pdserve.router.models import Models
from pdserve.router.worker import lease_channel
from pdserve.rpc.access import PLAIN, Access, Secret
from pdserve.rpc.channel import connect
from pdserve.testing import Cluster
from pdserve.v1 import trace_pb2, worker_pb2_grpc
from tests.integration.suites import prompt, serve
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

PUBLIC = "InferenceService"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
STRANGERS = {
    "no secret": PLAIN,
    "another secret": Access(Secret("x" * 43)),
}


def internal_methods() -> list[MethodDescriptor]:
    """Each RPC of every service that the schemas know, but for the public one's."""
    modules = [
        importlib.import_module(f"pdserve.v1.{found.name}") for found in pkgutil.iter_modules(pdserve.v1.__path__)
    ]
    services = [
        one
        for module in modules
        if hasattr(module, "DESCRIPTOR")
        for one in module.DESCRIPTOR.services_by_name.values()
    ]
    return [method for one in services if one.name != PUBLIC for method in one.methods]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("internal")
    part = ModelPart(make_tiny_model(folder / "model"), "tiny", prefill=1, decode=1)
    async with serve(folder / "logs", part, prefix_caches=1) as made:
        yield made


def internal(cluster: Cluster) -> dict[str, str]:
    """Endpoints by name."""
    return {one.name: one.endpoint for one in (*cluster.suite.workers, *cluster.suite.caches)}


async def code_of(channel: grpc.aio.Channel, path: str) -> grpc.StatusCode:
    """How a call ends that says nothing."""
    call: Any = channel.stream_stream(path)(timeout=10)
    try:
        await call.done_writing()
        return await call.code()
    finally:
        call.cancel()


@pytest.mark.parametrize("stranger", STRANGERS)
async def test_a_stranger_is_refused_on_every_internal_rpc(cluster: Cluster, stranger: str) -> None:
    """Whatever the schemas know, on every internal port: also what is added to them later."""
    methods = internal_methods()
    assert {"Session", "PrefillSession", "Drain", "Link", "Store"} <= {method.name for method in methods}
    paths = [f"/{method.containing_service.full_name}/{method.name}" for method in methods]
    for name, endpoint in internal(cluster).items():
        async with connect(endpoint, STRANGERS[stranger]) as channel:
            for path in (*paths, REFLECTION, "/nobody.knows/This"):
                assert await code_of(channel, path) is grpc.StatusCode.UNAUTHENTICATED, f"{path} of {name}"


async def test_probes_need_no_secret(cluster: Cluster) -> None:
    for endpoint in internal(cluster).values():
        async with connect(endpoint) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_the_suite_answers_and_so_does_who_has_its_secret(cluster: Cluster) -> None:
    """Prefill, transfer, decode and the prefix cache all show it to one another."""
    answer = await cluster.client.complete(prompt(100), max_tokens=8, temperature=0.0, ignore_eos=True)
    assert len(answer.token_ids) == 8 and answer.finish.usage.prefill_worker == "prefill-0"
    for endpoint in internal(cluster).values():
        async with connect(endpoint, cluster.access) as channel:
            request = trace_pb2.GetSpansRequest(trace_id="0" * 32)
            await worker_pb2_grpc.WorkerServiceStub(channel).GetSpans(request, timeout=10)
            assert await code_of(channel, "/nobody.knows/This") is grpc.StatusCode.UNIMPLEMENTED
    await cluster.assert_all_free()


async def test_a_command_that_asks_workers_is_told_where_the_secret_is(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    await probe_speed.probe(cluster.endpoint, 0, 16)
    assert "cannot be asked" in capsys.readouterr().err
    await probe_speed.probe(cluster.endpoint, 0, 16, access=cluster.access)
    assert "cannot be asked" not in capsys.readouterr().err


async def test_a_router_with_another_secret_has_no_workers_and_says_why_once(cluster: Cluster) -> None:
    settings = RouterSettings(worker=[cluster.workers["decode-0"].endpoint], startup_seconds=0)
    dial = partial(lease_channel, access=STRANGERS["another secret"])
    fleet, looks = Fleet(settings, Models(()), dial=dial), asyncio.Queue[None]()
    fleet.on_membership.append(lambda: looks.put_nowait(None))
    with capture_logs() as logs:
        async with fleet, asyncio.timeout(30):
            for _ in range(3):  # tries
                await looks.get()
            [worker] = fleet.workers
            assert not worker.connected and not fleet.unanswered
    [told] = [line for line in logs if line["event"] == "worker_refuses_us"]
    assert told["log_level"] == "error" and "internal secret" in told["reason"]


async def test_the_secret_is_private_and_stands_in_no_log_and_no_command_line(cluster: Cluster) -> None:
    path = cluster.suite.internal_secret_file

    def shown() -> list[bytes]:
        """What everybody on the machine, or who reads logs, can see of each service."""
        assert path.stat().st_mode & 0o077 == 0 and path.parent.stat().st_mode & 0o077 == 0
        found = []
        for one in cluster.suite.services:
            found += [Path(f"/proc/{one.pid}/{what}").read_bytes() for what in ("cmdline", "environ")]
            found.append("\n".join(one.log_tail(1_000_000)).encode())
        return found

    secret = cluster.access.secret
    assert secret is not None
    found = await asyncio.to_thread(shown)
    assert len(found) == 12 and all(found) and not any(secret.text.encode() in text for text in found)
