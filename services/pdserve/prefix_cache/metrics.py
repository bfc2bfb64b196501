"""What a prefix cache exports: its store's own counts, read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pdserve.prefix_cache.store import BlockStore
from pdserve.telemetry.metrics import CollectorRegistry, Labelled, Metric, counter, gauge


class CacheMetrics:
    """A collector of one store; `moved` tells the bytes sent and received."""

    def __init__(self, worker_id: str, store: BlockStore, moved: Callable[[], tuple[int, int]]) -> None:
        self.registry = CollectorRegistry()
        self._identity = (worker_id, "prefix_cache", "")
        self._store, self._moved = store, moved
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        store, (sent, received) = self._store, self._moved()
        info: Labelled = {self._identity: 1.0}
        yield gauge("worker_info", "Who this is; always 1.", info, ["worker_id", "role", "model_name"])
        yield gauge("prefix_store_capacity_bytes", "KV bytes that may be kept.", store.capacity)
        yield gauge("prefix_store_bytes", "KV bytes that are kept.", store.used)
        yield gauge("prefix_store_blocks", "KV blocks that are kept.", len(store))
        yield counter("prefix_store_hits_total", "Blocks that were asked for and sent.", store.hits)
        yield counter("prefix_store_misses_total", "Blocks that were asked for and not here.", store.misses)
        yield counter("prefix_store_evictions_total", "Blocks that made room for others.", store.evicted)
        yield counter("prefix_store_corrupt_total", "Blocks with a wrong checksum, dropped or refused.", store.corrupt)
        moved: Labelled = {("sent",): float(sent), ("received",): float(received)}
        yield counter("prefix_store_transfer_bytes_total", "KV bytes of blocks, both ways.", moved, ["direction"])
