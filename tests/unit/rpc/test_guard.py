"""Who may call a server at all."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from pdserve.rpc.access import INTERNAL, PLAIN, Access, Secret
from pdserve.rpc.channel import connect
from pdserve.rpc.server import GrpcServer, Service, internal_check, is_loopback
from pdserve.rpc.settings import ServiceSettings
from pdserve.v1 import trace_pb2, worker_pb2_grpc
from pdserve.worker.service import WorkerServicer
from pdserve.worker.watch import WatchBoard

OURS = Access(Secret("a-secret-of-this-fleet"))
SPANS = trace_pb2.GetSpansRequest(trace_id="0" * 32)


def services() -> list[Service]:
    async def nothing() -> None: ...

    add = worker_pb2_grpc.add_WorkerServiceServicer_to_server
    return [(add, WorkerServicer(WatchBoard(), nothing), "pdserve.v1.WorkerService")]


async def health(channel: grpc.aio.Channel) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)).status)


@pytest.mark.parametrize("settings", [ServiceSettings(), ServiceSettings(host="0.0.0.0", advertise_host="127.0.0.1")])
async def test_a_server_without_a_secret_answers_anybody_and_says_so_where_others_reach_it(
    settings: ServiceSettings,
) -> None:
    with capture_logs() as logs:
        check = internal_check(PLAIN, settings)
    assert check is None
    warned = [line for line in logs if line["event"] == "open_to_anybody"]
    assert len(warned) == (settings.host == "0.0.0.0")
    async with GrpcServer(settings, services()) as server, connect(server.endpoint) as channel:
        await worker_pb2_grpc.WorkerServiceStub(channel).GetSpans(SPANS, timeout=5)


async def test_the_secret_goes_with_what_a_call_says_itself() -> None:
    """A caller that names the secret's metadata itself shows nothing better, and its other metadata arrives."""
    settings = ServiceSettings()
    seen: list[dict[str, str]] = []
    inner = internal_check(OURS, settings)
    assert inner is not None

    async def check(method: str, metadata: Any) -> None:
        seen.append(dict(metadata))
        await inner(method, metadata)

    async with GrpcServer(settings, services(), check=check) as server:
        async with connect(server.endpoint, OURS) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            await stub.GetSpans(SPANS, timeout=5, metadata=(("x-more", "yes"),))
        async with connect(server.endpoint) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                await stub.GetSpans(SPANS, timeout=5, metadata=((INTERNAL, "guessed-by-somebody"),))
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "guessed" not in str(refused.value.details())
            assert await health(channel) == health_pb2.HealthCheckResponse.SERVING
    assert seen[0]["x-more"] == "yes" and len(seen) == 2


@pytest.mark.parametrize(
    ("host", "alone"),
    [
        *((host, True) for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")),
        *((host, False) for host in ("0.0.0.0", "", "::", "10.0.0.1", "worker-1")),
    ],
)
def test_which_addresses_only_this_machine_reaches(host: str, alone: bool) -> None:
    assert is_loopback(host) is alone
