"""What a worker tells about itself: a snapshot, then numbered deltas, to any number of watchers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress

import grpc

from pdserve.core.errors import Unavailable
from pdserve.engine.outputs import Load
from pdserve.rpc.convert import speed_to_proto
from pdserve.rpc.errors import RpcError
from pdserve.transfer.messages import TransferReport
from pdserve.v1 import worker_pb2

# Hashes that may wait for one watcher; beyond that it starts again with a snapshot.
MAX_PENDING = 1 << 17
MAX_HASHES_IN_DELTA = 1 << 14
# A watcher hears at least this often, in seconds (lease / 5), so that silence means that the worker is gone.
HEARTBEAT = 1.0
# And at most this often: loads in between are of no use to anyone, and steps of a small model come every millisecond.
PACE = 0.01
FAREWELL = 1.0  # seconds for watchers to hear that the worker stops
# Seconds between two link tables for one watcher; a change in between waits for it, or for the heartbeat after it.
LINKS_PACE = 1.0


class _Watcher:
    """What one watcher has not been told yet. Loads and link tables replace each other; of a hash the last change
    counts."""

    def __init__(self, hashes: Iterable[bytes]) -> None:
        self.changes: dict[bytes, bool] = dict.fromkeys(hashes, True)
        self.limit = MAX_PENDING + len(self.changes)
        self.links: worker_pb2.LinkTable | None = None  # as told last
        self.links_due = 0.0
        self.news = asyncio.Event()
        self.news.set()  # its load: a worker knows its speed from the start

    def tell(self, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        for digest in removed:
            self.changes[digest] = False
        for digest in stored:
            self.changes[digest] = True
        self.news.set()

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """At most MAX_HASHES_IN_DELTA changes, oldest first; `news` stays set while there are more."""
        stored: list[bytes] = []
        removed: list[bytes] = []
        if len(self.changes) <= MAX_HASHES_IN_DELTA:
            taken = self.changes
            self.changes = {}
            self.news.clear()
        else:
            oldest = list(self.changes)[:MAX_HASHES_IN_DELTA]
            taken = {digest: self.changes.pop(digest) for digest in oldest}
        for digest, is_stored in taken.items():
            (stored if is_stored else removed).append(digest)
        return stored, removed

    def take_links(self, table: worker_pb2.LinkTable, now: float) -> worker_pb2.LinkTable | None:
        """`table` where it is news, and due; the first one always is. `now` is in seconds, of a steady clock."""
        if self.links is not None and (now < self.links_due or self.links == table):
            return None
        self.links, self.links_due = table, now + LINKS_PACE
        return table


class WatchBoard:
    """A worker's present state, and those who watch it. All on one event loop; `publish` never waits."""

    def __init__(self) -> None:
        self.snapshot: worker_pb2.WorkerSnapshot | None = None
        self.load = worker_pb2.WorkerLoad()
        self.links = worker_pb2.LinkTable()
        self.draining = False
        self.suspended = ""  # why nobody may count on this worker for now
        # Hashes of the blocks that are reusable now, oldest first: a mirror of the engine's index.
        self.stored: dict[bytes, None] = {}
        self._watchers: dict[_Watcher, None] = {}  # in the order in which they came
        self._left = asyncio.Event()  # set whenever a watcher leaves
        self._closed = False

    def start(self, snapshot: worker_pb2.WorkerSnapshot) -> None:
        """From now on watchers are served; before, they are refused as UNAVAILABLE."""
        self.snapshot = snapshot

    def publish(self, load: worker_pb2.WorkerLoad, stored: Iterable[bytes] = (), removed: Iterable[bytes] = ()) -> None:
        """Take in a step's news. No hash is in both lists (see BlockPool.take_changes)."""
        self.load = load
        for digest in removed:
            self.stored.pop(digest, None)
        self.stored.update(dict.fromkeys(stored))
        for watcher in self._watchers:
            watcher.tell(stored, removed)

    def publish_links(self, links: worker_pb2.LinkTable) -> None:
        """Take in the state of all KV links; `links` must not change afterwards."""
        self.links = links
        for watcher in self._watchers:
            watcher.news.set()

    def set_draining(self) -> None:
        self.draining = True
        if self.snapshot is not None:
            self.snapshot.draining = True
        for watcher in self._watchers:
            watcher.news.set()

    def suspend(self, reason: str) -> None:
        """End every watch with UNAVAILABLE and refuse new ones until `resume`: to who watches the worker is gone."""
        self.suspended = reason
        for watcher in self._watchers:
            watcher.news.set()

    def resume(self) -> None:
        """What `suspend` said is over."""
        self.suspended = ""

    async def close(self) -> None:
        """End every watch with UNAVAILABLE; whoever drains has told of it by then. Waits for the last one to end, up to
        FAREWELL seconds."""
        self._closed = True
        for watcher in self._watchers:
            watcher.news.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL):
                while self._watchers:
                    self._left.clear()
                    await self._left.wait()

    async def watch(self) -> AsyncIterator[worker_pb2.WatchResponse]:
        """The snapshot, all stored hashes and links, then what changes. Raises RpcError (ABORTED) for a watcher that
        lags too far behind, and Unavailable before the start and after the end."""
        if self.snapshot is None or self._closed:
            raise Unavailable("the worker is starting" if self.snapshot is None else "the worker is stopping")
        if self.suspended:
            raise Unavailable(self.suspended)
        watcher = _Watcher(self.stored)
        self._watchers[watcher] = None
        try:
            told_draining = self.draining
            yield worker_pb2.WatchResponse(snapshot=self.snapshot)
            sequence, loop = 0, asyncio.get_running_loop()
            pace = asyncio.Event()
            while True:
                if not self._closed:
                    with suppress(TimeoutError):  # nothing new: the delta below is a heartbeat
                        async with asyncio.timeout(HEARTBEAT):
                            await watcher.news.wait()
                if self.suspended:
                    raise Unavailable(self.suspended)
                if self._closed and told_draining == self.draining:  # who goes in order has said so before
                    raise Unavailable("the worker is stopping")
                if len(watcher.changes) > watcher.limit:
                    raise RpcError(grpc.StatusCode.ABORTED, "this watcher lags too far behind; watch again")
                stored, removed = watcher.take()
                sequence, told_draining = sequence + 1, self.draining
                delta = worker_pb2.WorkerDelta(
                    sequence=sequence,
                    load=self.load,
                    stored=stored,
                    removed=removed,
                    draining=self.draining,
                    links=watcher.take_links(self.links, loop.time()),
                )
                yield worker_pb2.WatchResponse(delta=delta)
                pace.clear()
                loop.call_later(PACE, pace.set)
                await pace.wait()
        finally:
            del self._watchers[watcher]
            self._left.set()


def load_to_proto(load: Load) -> worker_pb2.WorkerLoad:
    return worker_pb2.WorkerLoad(
        free_blocks=load.free_blocks,
        cached_blocks=load.cached_blocks,
        owned_blocks=load.owned_blocks,
        reserved_blocks=load.reserved_blocks,
        running=load.running,
        waiting=load.waiting,
        pending_prefill_tokens=load.pending_prefill_tokens,
        steps=load.steps,
        preemptions=load.preemptions,
        kv_bytes_sent=load.kv_bytes_sent,
        kv_bytes_received=load.kv_bytes_received,
        prefill_tokens_per_second=load.prefill_rate,
        busy_seconds=load.busy_seconds,
        prefix_queries=load.prefix_queries,
        prefix_hits=load.prefix_hits,
        computed_tokens=load.computed_tokens,
        sampled_tokens=load.sampled_tokens,
        pending_prefill_squares=load.pending_prefill_squares,
        bounded=load.bounded,
        speed=speed_to_proto(load.speed),
    )


def links_to_proto(report: TransferReport) -> worker_pb2.LinkTable:
    """The links of a report, by peer."""
    table = worker_pb2.LinkTable()
    for link in sorted(report.links, key=lambda link: link.peer):
        table.links.add(
            peer=link.peer,
            transport=link.transport,
            path=link.path,
            degraded=link.degraded,
            bytes_sent=link.bytes_sent,
            bytes_received=link.bytes_received,
            bytes_per_second=link.bytes_per_second,
            bytes_in_flight=link.bytes_in_flight,
            frames_in_flight=link.frames_in_flight,
            credit_bytes=link.credit,
            round_trip_seconds=link.round_trip,
        )
    return table
