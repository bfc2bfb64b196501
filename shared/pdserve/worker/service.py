"""WorkerService: what routers and people ask every worker, whatever its role."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import grpc
import grpc.aio

from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.rpc.convert_trace import answer_get_spans
from pdserve.rpc.endpoint import check_endpoint
from pdserve.rpc.errors import RpcError, abort
from pdserve.rpc.versions import agree
from pdserve.v1 import trace_pb2, worker_pb2, worker_pb2_grpc
from pdserve.worker.links import Probe
from pdserve.worker.watch import WatchBoard

MAX_PROBE_BYTES = 1 << 30
MAX_PROBE_SIZES = 32


class LinkOpener(Protocol):
    """What WorkerService needs of a worker's links; see worker.links.Links."""

    async def open(self, endpoint: str, peer: str) -> str: ...
    async def probe(self, endpoint: str, peer: str, frame_bytes: list[int], bytes_per_size: int) -> Probe: ...


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """pdserve.v1.WorkerService over a WatchBoard. `links` None: this worker has none. `on_drain` hears of the first
    Drain."""

    def __init__(
        self, board: WatchBoard, on_drain: Callable[[], Awaitable[None]], links: LinkOpener | None = None
    ) -> None:
        self._board, self._on_drain, self._links = board, on_drain, links

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        updates = self._board.watch()
        try:
            if request.HasField("protocol"):
                agree(request.protocol.min, request.protocol.max)
            async for update in updates:
                yield update
        except PdserveError as error:
            await abort(context, error)
        finally:
            await updates.aclose()  # type: ignore[attr-defined]

    async def OpenLink(
        self, request: worker_pb2.OpenLinkRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.OpenLinkResponse:
        try:
            links = self._require_links(request.endpoint, request.worker_id)
            return worker_pb2.OpenLinkResponse(transport=await links.open(request.endpoint, request.worker_id))
        except PdserveError as error:
            await abort(context, error)

    async def ProbeLink(
        self, request: worker_pb2.ProbeLinkRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.ProbeLinkResponse:
        try:
            links = self._require_links(request.endpoint, request.worker_id)
            if request.bytes_per_size > MAX_PROBE_BYTES:
                raise InvalidRequest("bytes_per_size", f"must be at most {MAX_PROBE_BYTES}")
            if len(request.frame_bytes) > MAX_PROBE_SIZES or 0 in request.frame_bytes:
                raise InvalidRequest("frame_bytes", f"must be at most {MAX_PROBE_SIZES} sizes above 0")
            probe = await links.probe(
                request.endpoint, request.worker_id, list(request.frame_bytes), request.bytes_per_size
            )
        except PdserveError as error:
            await abort(context, error)
        response = worker_pb2.ProbeLinkResponse(
            transport=probe.transport,
            path=probe.path,
            degraded=probe.degraded,
            round_trip_seconds=probe.measured.round_trip,
        )
        for size, rate in probe.measured.samples:
            response.samples.add(frame_bytes=size, bytes_per_second=rate)
        return response

    def _require_links(self, endpoint: str, worker_id: str) -> LinkOpener:
        if self._links is None:
            raise RpcError(grpc.StatusCode.UNIMPLEMENTED, "this worker has no KV links")
        check_endpoint(endpoint, "endpoint")
        if not worker_id:
            raise InvalidRequest("worker_id", "must be set")
        return self._links

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.DrainResponse:
        await self._on_drain()
        return worker_pb2.DrainResponse()

    async def GetSpans(
        self, request: trace_pb2.GetSpansRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> trace_pb2.GetSpansResponse:
        snapshot = self._board.snapshot
        try:
            return answer_get_spans(request, snapshot.worker_id if snapshot else "")
        except PdserveError as error:
            await abort(context, error)
