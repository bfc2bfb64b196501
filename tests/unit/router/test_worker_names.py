"""Workers by addresses that a name was resolved to, over TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.router.worker import lease_channel
from pdserve.rpc.access import Access
from pdserve.rpc.server import GrpcServer
from pdserve.rpc.settings import ServiceSettings
from pdserve.rpc.tls import Tls
from tests.certificates import authority


async def health(channel: grpc.aio.Channel) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)).status)


async def test_an_address_is_known_by_the_name_that_it_was_resolved_from(tmp_path: Path) -> None:
    """A router follows each address of a name by itself; certificates are for names."""
    ours = authority(tmp_path)
    own = ours.issue("worker", "subjectAltName=DNS:workers.example")
    settings = ServiceSettings(tls_cert_file=own.cert, tls_key_file=own.key)
    access = Access(tls=Tls(ours.cert))
    async with GrpcServer(settings, []) as server:
        async with lease_channel(server.endpoint, 30.0, "workers.example", access) as channel:
            assert await health(channel) == health_pb2.HealthCheckResponse.SERVING
        async with lease_channel(server.endpoint, 30.0, "", access) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await health(channel)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
