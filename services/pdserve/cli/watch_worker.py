"""Asking one worker itself, by its Watch stream, rather than the router for what it heard last."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from pdserve.core.errors import Unavailable
from pdserve.rpc.access import PLAIN, Access

if TYPE_CHECKING:
    from pdserve.client import FleetWorker
    from pdserve.v1 import worker_pb2

T = TypeVar("T")


def address_of(worker: FleetWorker, access: Access) -> str:
    """Where to ask a worker: as its router does, and with TLS by the name that it gives itself, which its certificate
    is for; routers know some by bare addresses."""
    return worker.own_endpoint or worker.endpoint if access.tls else worker.endpoint


async def first_load(
    endpoint: str,
    wanted: Callable[[worker_pb2.WorkerLoad], T | None],
    timeout: float | None = None,
    access: Access = PLAIN,
) -> T:
    """Wait until the worker at `endpoint` tells a load of which `wanted` makes something, and return that. The call
    carries `access`.

    Raises PdserveError where it cannot be asked, ends the stream, or tells none within `timeout` seconds.
    """
    import grpc.aio

    from pdserve.rpc.channel import connect
    from pdserve.rpc.errors import error_from_call
    from pdserve.rpc.versions import our_versions
    from pdserve.v1 import worker_pb2, worker_pb2_grpc

    request = worker_pb2.WatchRequest(protocol=our_versions())
    async with connect(endpoint, access) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Watch(request, timeout=timeout)
        try:
            async for event in call:
                if event.HasField("delta") and (found := wanted(event.delta.load)) is not None:
                    return found
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error) from error
        finally:
            call.cancel()
    raise Unavailable(f"{endpoint} ended its Watch stream")
