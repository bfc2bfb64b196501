"""PrefixCacheService, and what the cache tells the fleet about itself."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
import structlog

from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.prefix_cache.config import PrefixCacheSettings
from pdserve.prefix_cache.metrics import CacheMetrics
from pdserve.prefix_cache.store import BlockStore, Stored
from pdserve.rpc.access import access_of
from pdserve.rpc.errors import abort
from pdserve.rpc.server import GrpcServer, Service, internal_check
from pdserve.rpc.versions import our_versions, software_version
from pdserve.telemetry import names
from pdserve.telemetry.export import Metrics
from pdserve.telemetry.logs import setup_logs
from pdserve.telemetry.tracing import TRACEPARENT, record_span, setup_tracing
from pdserve.v1 import prefix_cache_pb2, prefix_cache_pb2_grpc, worker_pb2, worker_pb2_grpc
from pdserve.worker.service import WorkerServicer
from pdserve.worker.watch import WatchBoard

log = structlog.get_logger(__name__)

# Payload bytes in one FetchResponse: the receiver can load what came while more is on its way.
RESPONSE_BYTES = 1 << 20


class PrefixCacheServicer(prefix_cache_pb2_grpc.PrefixCacheServiceServicer):
    """pdserve.v1.PrefixCacheService over a BlockStore; each change goes to `board`."""

    def __init__(self, store: BlockStore, board: WatchBoard) -> None:
        self._store, self._board = store, board
        self._load = worker_pb2.WorkerLoad()

    async def Lookup(
        self, request: prefix_cache_pb2.LookupRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> prefix_cache_pb2.LookupResponse:
        began = time.time_ns()
        found = self._store.leading(request.hashes)
        self._trace(names.SPAN_PREFIX_LOOKUP, began, context, {names.BLOCKS: found})
        return prefix_cache_pb2.LookupResponse(leading_blocks=found)

    async def Fetch(
        self, request: prefix_cache_pb2.FetchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[prefix_cache_pb2.FetchResponse]:
        began, blocks, total = time.time_ns(), 0, 0
        self._store.touch(request.hashes)
        response, size = prefix_cache_pb2.FetchResponse(), 0
        for digest in request.hashes:
            found = self._store.get(digest)
            if found is None:
                break
            payload, crc32 = found
            response.blocks.add(hash=digest, payload=payload, crc32=crc32)
            size += len(payload)
            blocks, total = blocks + 1, total + len(payload)
            if size >= RESPONSE_BYTES:
                self._tell(sent=size)
                yield response
                response, size = prefix_cache_pb2.FetchResponse(), 0
        if size:
            self._tell(sent=size)
            yield response
        self._trace(names.SPAN_PREFIX_READ, began, context, {names.BLOCKS: blocks, names.KV_BYTES: total})

    async def Store(
        self,
        request_iterator: AsyncIterator[prefix_cache_pb2.StoreRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> prefix_cache_pb2.StoreResponse:
        counts = dict.fromkeys(Stored, 0)
        chain: list[bytes] = []
        try:
            async for request in request_iterator:
                received = 0
                for block in request.blocks:
                    counts[self._store.put(block.hash, block.payload, block.crc32)] += 1
                    chain.append(block.hash)
                    received += len(block.payload)
                self._tell(received=received)
        except InvalidRequest as error:  # what is no message; what came before it is kept
            await abort(context, error)
        self._store.touch(chain)
        return prefix_cache_pb2.StoreResponse(
            stored=counts[Stored.STORED], present=counts[Stored.PRESENT], refused=counts[Stored.REFUSED]
        )

    def _trace(
        self, name: str, began: int, context: grpc.aio.ServicerContext[Any, Any], attributes: dict[str, int]
    ) -> None:
        """Part of somebody's trace, or none: a cache begins none of its own."""
        traceparent = next((value for key, value in context.invocation_metadata() or () if key == TRACEPARENT), "")
        if isinstance(traceparent, str) and traceparent:
            record_span(name, began, time.time_ns(), traceparent, attributes)

    def _tell(self, sent: int = 0, received: int = 0) -> None:
        load = self._load
        load = worker_pb2.WorkerLoad(
            cached_blocks=len(self._store),
            kv_bytes_sent=load.kv_bytes_sent + sent,
            kv_bytes_received=load.kv_bytes_received + received,
        )
        self._load = load
        self._board.publish(load)

    def moved(self) -> tuple[int, int]:
        """KV bytes sent and received so far."""
        load = self._load
        return load.kv_bytes_sent, load.kv_bytes_received


async def serve(settings: PrefixCacheSettings, worker_id: str) -> None:
    """Serve as `worker_id` until told to stop. The content is memory's, and goes with the process. Raises PdserveError
    when it cannot."""
    board = WatchBoard()
    store = BlockStore(int(settings.capacity))
    cache = PrefixCacheServicer(store, board)

    async def leave() -> None:
        board.set_draining()
        await server.set_ready(False)

    async def close() -> None:
        board.set_draining()
        await board.close()

    check = internal_check(access_of(settings.internal_secret_file), settings)
    services: list[Service] = [
        (prefix_cache_pb2_grpc.add_PrefixCacheServiceServicer_to_server, cache, "pdserve.v1.PrefixCacheService"),
        (
            worker_pb2_grpc.add_WorkerServiceServicer_to_server,
            WorkerServicer(board, leave),
            "pdserve.v1.WorkerService",
        ),
    ]
    metrics = CacheMetrics(worker_id, store, cache.moved)
    server = GrpcServer(settings, services, Metrics(metrics.registry, "prefix_cache", worker_id), check=check)
    async with server:
        board.start(
            worker_pb2.WorkerSnapshot(
                worker_id=worker_id,
                incarnation=secrets.token_hex(8),
                role=worker_pb2.ROLE_PREFIX_CACHE,
                endpoint=server.endpoint,
                node=socket.gethostname(),
                device="cpu",
                versions={"pdserve": software_version()},
                protocol=our_versions(),
            )
        )
        server.on_drain.append(close)
        await server.set_ready(True, worker_id=worker_id, capacity=int(settings.capacity))
        await server.run_until_stopped()
        log.info(
            "cache_totals",
            blocks=len(store),
            bytes=store.used,
            hits=store.hits,
            misses=store.misses,
            evicted=store.evicted,
            corrupt=store.corrupt,
        )


def main(argv: Sequence[str] | None = None) -> int:
    settings = PrefixCacheSettings.load(argv)
    setup_logs("prefix_cache", settings.log_level)
    worker_id = settings.worker_id or f"prefix-cache-{secrets.token_hex(4)}"
    stop_tracing = setup_tracing("prefix_cache", settings.otlp_endpoint, ring=settings.trace_ring, instance=worker_id)
    try:
        asyncio.run(serve(settings, worker_id))
    except PdserveError as error:
        log.error("failed", error=str(error))
        return 1
    finally:
        stop_tracing()
    return 0
