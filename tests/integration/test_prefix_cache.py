"""A real prefix-cache process, and a worker's client of it with a recorded engine."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdserve.core.hashing import block_hashes, root_hash
from pdserve.core.layout import KVLayout
from pdserve.core.sampling import SamplingParams
from pdserve.core.sequence import SequenceSpec
from pdserve.rpc.channel import connect
from pdserve.v1 import prefix_cache_pb2, prefix_cache_pb2_grpc, worker_pb2, worker_pb2_grpc
from pdserve.worker.messages import BlocksExported, ExportBlocks, LoadBlocks
from pdserve.worker.prefix_client import PrefixClient
from tests.otlp_receiver import OtlpReceiver, attributes

LAYOUT = KVLayout(16, 2, 2, 16, "float32", b"f" * 16)
SPEC = SequenceSpec("r", tuple(range(100)), 100, SamplingParams())
HASHES = block_hashes(root_hash(LAYOUT), SPEC.token_ids[:-1], LAYOUT.block_size)


@asynccontextmanager
async def cache(*arguments: str) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pdserve.prefix_cache", "--launcher-fd", str(theirs.fileno()), *arguments),
            pass_fds=[theirs.fileno()],
        )
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        async with asyncio.timeout(20):
            while (event := json.loads(await reader.readline()))["event"] != "ready":
                pass
        yield event["endpoint"], process
    finally:
        writer.close()  # the launcher is gone: the service ends by itself
        async with asyncio.timeout(10):
            await process.wait()


class Engine:
    """Records what was loaded, and exports one recognisable payload for each block."""

    def __init__(self) -> None:
        self.loaded: dict[bytes, bytes] = {}
        self.client: PrefixClient | None = None

    def send(self, message: Any) -> None:
        if isinstance(message, LoadBlocks):
            size = LAYOUT.block_bytes
            assert len(message.payload) == size * len(message.hashes)
            for number, digest in enumerate(message.hashes):
                self.loaded[digest] = message.payload[number * size : (number + 1) * size]
        elif isinstance(message, ExportBlocks):
            assert self.client is not None
            payload = b"".join(content(digest) for digest in message.hashes)
            answer = BlocksExported(message.hashes, payload)
            asyncio.get_running_loop().call_soon(self.client.on_exported, answer)

    async def drain(self) -> None: ...


def content(digest: bytes) -> bytes:
    return digest * (LAYOUT.block_bytes // len(digest))


@asynccontextmanager
async def client_of(endpoint: str, stored: set[bytes]) -> AsyncIterator[tuple[PrefixClient, Engine]]:
    engine = Engine()
    async with PrefixClient(endpoint, LAYOUT, engine, stored) as client:  # type: ignore[arg-type]
        engine.client = client
        yield client, engine


async def test_traces_and_metrics_are_of_the_same_instance() -> None:
    """Where nobody gave it a name, too."""
    with OtlpReceiver() as receiver:
        async with cache("--otlp-endpoint", receiver.endpoint) as (endpoint, _), connect(endpoint) as channel:
            stub: prefix_cache_pb2_grpc.PrefixCacheServiceAsyncStub = prefix_cache_pb2_grpc.PrefixCacheServiceStub(
                channel
            )
            request = prefix_cache_pb2.FetchRequest(hashes=[HASHES[0]])
            metadata = (("traceparent", f"00-{'a' * 32}-{'b' * 16}-01"),)
            async for _ in stub.Fetch(request, timeout=10, metadata=metadata):
                pass
        sent = [request.resource_metrics for request in receiver.metrics]
        told = [request.resource_spans for request in receiver.traces]
        assert sent and told, "both are sent at the end"
        instances = {
            attributes(part.resource.attributes).get("service.instance.id")
            for parts in (*sent, *told)
            for part in parts
        }
    [instance] = instances
    assert instance is not None and instance.startswith("prefix-cache-")


async def stored_blocks(client: PrefixClient, count: int) -> None:
    await asyncio.wait_for(client.flush(), 10)
    assert client.counts["stored blocks"] == count


async def test_what_one_worker_stores_another_fetches() -> None:
    async with cache() as (endpoint, _):
        async with client_of(endpoint, set(HASHES)) as (client, _):
            client.store_later(SPEC)
            await stored_blocks(client, 6)
            client.store_later(SPEC)  # known by now: no work
        async with client_of(endpoint, {HASHES[0]}) as (client, engine):
            await client.prefetch(SPEC)
            assert engine.loaded == {digest: content(digest) for digest in HASHES[1:]}
            assert client.counts["fetched blocks"] == 5
            engine.loaded.clear()
            await client.prefetch(SPEC)  # loaded a moment ago
            assert not engine.loaded
        async with connect(endpoint) as channel:
            watch: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
            call = watch.Watch(worker_pb2.WatchRequest(), timeout=10)
            try:
                assert (await call.read()).snapshot.role == worker_pb2.ROLE_PREFIX_CACHE  # type: ignore[union-attr]
                assert (await call.read()).delta.load.cached_blocks == 6  # type: ignore[union-attr]
            finally:
                call.cancel()


async def test_a_burst_with_one_beginning_fetches_once() -> None:
    async with cache() as (endpoint, _):
        async with client_of(endpoint, set(HASHES)) as (client, _):
            client.store_later(SPEC)
            await stored_blocks(client, 6)
        async with client_of(endpoint, set()) as (client, _):
            await asyncio.gather(*(client.prefetch(SPEC) for _ in range(8)))
            assert client.counts["fetched blocks"] == 6


async def test_computing_is_chosen_where_it_is_quicker() -> None:
    async with cache() as (endpoint, _):
        async with client_of(endpoint, set(HASHES)) as (client, _):
            client.store_later(SPEC)
            await stored_blocks(client, 6)
        async with client_of(endpoint, set()) as (client, engine):
            client.observe_prefill(10**12, 1.0)
            await client.prefetch(SPEC)  # the fetch rate is unknown: measured now
            assert len(engine.loaded) == 6
            other = SequenceSpec("q", SPEC.token_ids, 100, SamplingParams())
            client._recent.clear()
            await client.prefetch(other)
            assert client.counts["skipped: computing is quicker"] == 1


async def test_rotten_blocks_are_not_loaded() -> None:
    async with cache() as (endpoint, _), connect(endpoint) as channel:
        stub: prefix_cache_pb2_grpc.PrefixCacheServiceAsyncStub = prefix_cache_pb2_grpc.PrefixCacheServiceStub(channel)
        short = b"wrong size"
        blocks = [
            prefix_cache_pb2.CacheBlock(
                hash=HASHES[0], payload=content(HASHES[0]), crc32=zlib.crc32(content(HASHES[0]))
            ),
            prefix_cache_pb2.CacheBlock(hash=HASHES[1], payload=short, crc32=zlib.crc32(short)),
            prefix_cache_pb2.CacheBlock(hash=HASHES[2], payload=content(HASHES[2]), crc32=1),
        ]
        request = prefix_cache_pb2.StoreRequest(blocks=blocks)

        async def requests() -> AsyncIterator[prefix_cache_pb2.StoreRequest]:
            yield request

        response = await stub.Store(requests(), timeout=10)
        assert (response.stored, response.refused) == (2, 1)
        async with client_of(endpoint, set()) as (client, engine):
            await client.prefetch(SPEC)
            assert list(engine.loaded) == HASHES[:1] and client.counts["fetch cut: corrupt block"] == 1


async def test_capacity_bounds_what_is_kept() -> None:
    async with cache("--capacity", str(3 * LAYOUT.block_bytes)) as (endpoint, _):
        async with client_of(endpoint, set(HASHES)) as (client, _):
            client.store_later(SPEC)
            await stored_blocks(client, 6)
        async with connect(endpoint) as channel:
            watch: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
            call = watch.Watch(worker_pb2.WatchRequest(), timeout=10)
            try:
                await call.read()
                assert (await call.read()).delta.load.cached_blocks == 3  # type: ignore[union-attr]
            finally:
                call.cancel()


async def test_a_dead_or_stopped_service_delays_nobody() -> None:
    async with cache() as (endpoint, process), client_of(endpoint, set()) as (client, engine):
        await client.prefetch(SPEC)
        process.kill()
        await process.wait()
        await asyncio.wait_for(client.prefetch(SPEC), 2)
        assert sum(count for what, count in client.counts.items() if "failed" in what) == 1
        await asyncio.wait_for(client.prefetch(SPEC), 0.1)
        assert client.counts["skipped: service failed a moment ago"] == 1 and not engine.loaded


@pytest.mark.parametrize("arguments", [["--capacity", "0"], ["--capcity", "1GiB"]])
async def test_wrong_settings_end_the_process_with_2(arguments: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdserve.prefix_cache", *arguments), stderr=asyncio.subprocess.PIPE
    )
    _, errors = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2 and arguments[0].strip("-") in errors.decode()
