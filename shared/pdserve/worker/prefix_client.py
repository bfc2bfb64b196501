"""A worker's use of the prefix-cache service: blocks fetched before a prompt, stored after it.

Nothing here can fail a request: whatever is down, slow or corrupt is counted, logged and computed instead.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Container, Sequence
from types import TracebackType
from typing import Self

import grpc
import grpc.aio
import structlog

from pdserve.core.hashing import block_hashes, root_hash
from pdserve.core.layout import KVLayout
from pdserve.core.sequence import SequenceSpec
from pdserve.policy.prefix_fetch import Rate, should_fetch
from pdserve.rpc.access import PLAIN, Access
from pdserve.rpc.channel import connect
from pdserve.telemetry import names
from pdserve.telemetry.tracing import TRACEPARENT, span, traceparent_of
from pdserve.v1 import prefix_cache_pb2, prefix_cache_pb2_grpc
from pdserve.worker.engine_client import EngineClient
from pdserve.worker.messages import BlocksExported, ExportBlocks, LoadBlocks

log = structlog.get_logger(__name__)

LOOKUP_DEADLINE = 0.25  # seconds
FETCH_DEADLINE = (0.25, 5.0)  # seconds; in between, as long as computing would take
STORE_DEADLINE = 30.0
EXPORT_DEADLINE = 10.0
PIECE_BYTES = 8 << 20
EXPORT_BYTES = 2 << 20  # copied by the engine between two steps, so small
STORE_QUEUE = 64  # prompts that wait to be stored
KNOWN_HASHES = 1 << 17
COOL_OFF = 1.0  # seconds without the service after it failed, so that not every request waits for a dead one
RECENT = 2.0  # seconds that loaded blocks count as present before the engine has said so
HASH_OFF_LOOP = 4096  # tokens; hashing more takes over a millisecond


class PrefixClient:
    """One worker's client. `async with` runs the background store; its end cancels it.

    `stored` is the mirror of the engine's block index (WatchBoard.stored), read only. `counts` says what happened:
    fetched and stored blocks, and how often which reason prevented it. Calls carry `access`.
    """

    def __init__(
        self, endpoint: str, layout: KVLayout, engine: EngineClient, stored: Container[bytes], access: Access = PLAIN
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._endpoint, self._layout, self._engine, self._stored = endpoint, layout, engine, stored
        self._channel = connect(endpoint, access)
        stub: prefix_cache_pb2_grpc.PrefixCacheServiceAsyncStub = prefix_cache_pb2_grpc.PrefixCacheServiceStub(
            self._channel
        )
        self._stub = stub
        self._fetch_rate, self._compute_rate = Rate(), Rate()
        self._closed_until = 0.0
        self._recent: dict[bytes, float] = {}
        self._loading: dict[bytes, asyncio.Future[None]] = {}
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._queue: asyncio.Queue[SequenceSpec] = asyncio.Queue(STORE_QUEUE)
        self._exports: deque[asyncio.Future[BlocksExported]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._store_all(), name="prefix store")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Tell how long the engine took to compute `tokens` prompt tokens."""
        self._compute_rate.update(tokens, seconds, time.monotonic())

    async def prefetch(self, spec: SequenceSpec, traceparent: str = "") -> None:
        """Load what the service has of a prompt and the engine lacks, if that is quicker than computing it.

        The blocks are on their way to the engine when this returns. Takes LOOKUP_DEADLINE and FETCH_DEADLINE at most.
        Its span goes under that of `traceparent`, or of the sequence's own.
        """
        if time.monotonic() < self._closed_until:
            self.counts["skipped: service failed a moment ago"] += 1
            return
        hashes = await self._hashes(spec)
        missing = self._missing(hashes)
        # Requests with one beginning come in bursts: the first fetches, the others wait for it, then look again.
        if missing and (other := self._loading.get(missing[0])) is not None:
            await asyncio.wait({other}, timeout=FETCH_DEADLINE[1])
            missing = self._missing(hashes)
        if not missing:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loading.setdefault(missing[0], done)
        try:
            with span(names.SPAN_PREFIX_FETCH, traceparent or spec.traceparent) as fetch:
                loaded = await self._fetch(missing, traceparent_of(fetch))
                fetch.set_attributes({names.BLOCKS: loaded, names.KV_BYTES: loaded * self._layout.block_bytes})
        except grpc.aio.AioRpcError as error:
            self._failed("fetch", error)
        except Exception as error:  # whatever it is, the prompt is computed then
            self.counts["fetch failed: unexpected"] += 1
            log.exception("prefix_fetch_failed", error=repr(error))
        finally:
            done.set_result(None)
            if self._loading.get(missing[0]) is done:
                del self._loading[missing[0]]

    def store_later(self, spec: SequenceSpec) -> None:
        """Store the prompt's blocks in the background. Dropped, and counted, when too many wait already."""
        try:
            self._queue.put_nowait(spec)
        except asyncio.QueueFull:
            self.counts["store dropped: queue full"] += 1

    async def flush(self) -> None:
        """Wait until what `store_later` took is stored, or was given up."""
        await self._queue.join()

    def on_exported(self, message: BlocksExported) -> None:
        """Take the engine's answer to ExportBlocks; answers come in the order of the questions."""
        if self._exports:
            future = self._exports.popleft()
            if not future.done():
                future.set_result(message)

    async def _hashes(self, spec: SequenceSpec) -> list[bytes]:
        """Of the full blocks, without the one that holds the very last token: its logits are computed in any case."""
        root, size = root_hash(self._layout, spec.cache_salt), self._layout.block_size
        tokens = spec.token_ids[:-1]
        if len(tokens) > HASH_OFF_LOOP:
            return await asyncio.to_thread(block_hashes, root, tokens, size)
        return block_hashes(root, tokens, size)

    def _missing(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        horizon = time.monotonic() - RECENT
        for start, digest in enumerate(hashes):
            if digest not in self._stored and self._recent.get(digest, 0.0) < horizon:
                return hashes[start:]
        return ()

    async def _fetch(self, missing: Sequence[bytes], traceparent: str) -> int:
        """Returns how many blocks it loaded."""
        metadata = ((TRACEPARENT, traceparent),) if traceparent else ()
        found = await self._lookup(missing, metadata)
        for digest in missing[found:]:
            self._known.pop(digest, None)  # the service has evicted it: it may be stored again
        block_bytes, block_size = self._layout.block_bytes, self._layout.block_size
        now = time.monotonic()
        compute_rate = self._compute_rate.value(now)
        decision = should_fetch(
            tokens=found * block_size,
            size=found * block_bytes,
            fetch_rate=self._fetch_rate.value(now),
            compute_rate=compute_rate,
        )
        if not decision.fetch:
            if found:
                self.counts["skipped: computing is quicker"] += 1
                log.debug("prefix_not_fetched", blocks=found, reason=decision.reason)
            return 0
        low, high = FETCH_DEADLINE
        patience = high if compute_rate is None else min(high, max(low, found * block_size / compute_rate))
        request = prefix_cache_pb2.FetchRequest(hashes=missing[:found])
        call = self._stub.Fetch(request, timeout=patience, metadata=metadata)
        loaded, corrupt = 0, False
        try:
            hashes: list[bytes] = []
            payloads: list[bytes] = []
            async for response in call:
                for block in response.blocks:
                    expected = missing[loaded + len(hashes)] if loaded + len(hashes) < found else b""
                    if not self._intact(block, expected):
                        corrupt = True
                        break
                    hashes.append(block.hash)
                    payloads.append(block.payload)
                    if (len(hashes) + 1) * block_bytes > PIECE_BYTES:
                        loaded += await self._load(hashes, payloads)
                        hashes, payloads = [], []
                if corrupt:
                    break
            loaded += await self._load(hashes, payloads)
        finally:
            call.cancel()
        if corrupt:
            self.counts["fetch cut: corrupt block"] += 1
            log.warning("prefix_block_corrupt", endpoint=self._endpoint, loaded=loaded, wanted=found)
        if loaded:
            seconds = time.monotonic() - now
            self._fetch_rate.update(loaded * block_bytes, seconds, time.monotonic())
            self.counts["fetched blocks"] += loaded
            log.debug("prefix_fetched", blocks=loaded, ms=round(1e3 * seconds, 2), reason=decision.reason)
        return loaded

    async def _load(self, hashes: list[bytes], payloads: list[bytes]) -> int:
        if hashes:
            self._engine.send(LoadBlocks(hashes, b"".join(payloads)))
            now = time.monotonic()
            self._recent = {digest: at for digest, at in self._recent.items() if at > now - RECENT}
            self._recent.update(dict.fromkeys(hashes, now))
            self._remember(hashes)
            await self._engine.drain()
        return len(hashes)

    def _intact(self, block: prefix_cache_pb2.CacheBlock, expected: bytes) -> bool:
        return (
            block.hash == expected
            and len(block.payload) == self._layout.block_bytes
            and zlib.crc32(block.payload) == block.crc32
        )

    async def _lookup(self, hashes: Sequence[bytes], metadata: tuple[tuple[str, str], ...] = ()) -> int:
        request = prefix_cache_pb2.LookupRequest(hashes=hashes)
        response = await self._stub.Lookup(request, timeout=LOOKUP_DEADLINE, metadata=metadata)
        return min(response.leading_blocks, len(hashes))

    async def _store_all(self) -> None:
        while True:
            spec = await self._queue.get()
            try:
                await self._store(spec)
            except grpc.aio.AioRpcError as error:
                self._failed("store", error)
            except TimeoutError:
                self.counts["store failed: engine slow"] += 1
            except asyncio.InvalidStateError:  # the service ended the call between two writes
                self.counts["store failed: down"] += 1
            except Exception as error:  # one prompt that cannot be stored must not end the storing of others
                self.counts["store failed: unexpected"] += 1
                log.exception("prefix_store_failed", error=repr(error))
            finally:
                self._queue.task_done()

    async def _store(self, spec: SequenceSpec) -> None:
        if time.monotonic() < self._closed_until:
            self.counts["store dropped: service failed a moment ago"] += 1
            return
        hashes = await self._hashes(spec)
        unknown = next((start for start, digest in enumerate(hashes) if digest not in self._known), len(hashes))
        if unknown == len(hashes):
            return
        present = await self._lookup(hashes)
        self._remember(hashes[:present])
        wanted = [digest for digest in hashes[present:] if digest in self._stored]
        each = max(1, EXPORT_BYTES // self._layout.block_bytes)
        batches = [wanted[start : start + each] for start in range(0, len(wanted), each)]
        if not batches:
            return
        # Written piece by piece instead of from an iterator: grpc.aio turns an iterator's error into a cancellation.
        call = self._stub.Store(timeout=STORE_DEADLINE)
        sent: list[bytes] = []
        try:
            for batch in batches:
                request = await self._export(batch)
                sent += [block.hash for block in request.blocks]
                await call.write(request)
            await call.done_writing()
            response = await call
        finally:
            call.cancel()
        if not response.refused:
            self._remember(sent)
        self.counts["stored blocks"] += response.stored
        self.counts["store refused: no room"] += response.refused

    async def _export(self, batch: list[bytes]) -> prefix_cache_pb2.StoreRequest:
        size = self._layout.block_bytes
        future: asyncio.Future[BlocksExported] = asyncio.get_running_loop().create_future()
        self._exports.append(future)
        self._engine.send(ExportBlocks(batch))
        async with asyncio.timeout(EXPORT_DEADLINE):
            exported = await future
        blocks = []
        for number, digest in enumerate(exported.hashes):
            content = exported.payload[number * size : (number + 1) * size]
            blocks.append(prefix_cache_pb2.CacheBlock(hash=digest, payload=content, crc32=zlib.crc32(content)))
        return prefix_cache_pb2.StoreRequest(blocks=blocks)

    def _remember(self, hashes: Sequence[bytes]) -> None:
        for digest in hashes:
            self._known[digest] = None
            self._known.move_to_end(digest)
        while len(self._known) > KNOWN_HASHES:
            self._known.popitem(last=False)

    def _failed(self, what: str, error: grpc.aio.AioRpcError) -> None:
        self._closed_until = time.monotonic() + COOL_OFF
        self._known.clear()  # it may come back empty
        reason = "slow" if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else "down"
        self.counts[f"{what} failed: {reason}"] += 1
        log.warning("prefix_cache_failed", what=what, endpoint=self._endpoint, reason=reason, code=error.code().name)
