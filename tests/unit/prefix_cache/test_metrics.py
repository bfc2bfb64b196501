"""A prefix cache exports its store's own counts, as they are at the scrape."""

from __future__ import annotations

import zlib

from prometheus_client import generate_latest

from pdserve.core.hashing import HASH_BYTES
from pdserve.prefix_cache.metrics import CacheMetrics
from pdserve.prefix_cache.store import BlockStore


def test_a_scrape_shows_what_is_kept_and_what_became_of_requests() -> None:
    store, payload = BlockStore(20), b"0123456789"
    metrics = CacheMetrics("cache-0", store, lambda: (10, 30))
    for number in range(3):  # the third takes the first one's place
        store.put(bytes([number]) * HASH_BYTES, payload, zlib.crc32(payload))
    store.get(b"\2" * HASH_BYTES)
    store.get(b"\0" * HASH_BYTES)
    store.put(b"\3" * HASH_BYTES, payload, 1)
    lines = generate_latest(metrics.registry).decode().splitlines()
    for expected in (
        'pdserve_worker_info{model_name="",role="prefix_cache",worker_id="cache-0"} 1.0',
        "pdserve_prefix_store_bytes 20.0",
        "pdserve_prefix_store_capacity_bytes 20.0",
        "pdserve_prefix_store_blocks 2.0",
        "pdserve_prefix_store_hits_total 1.0",
        "pdserve_prefix_store_misses_total 1.0",
        "pdserve_prefix_store_evictions_total 1.0",
        "pdserve_prefix_store_corrupt_total 1.0",
        'pdserve_prefix_store_transfer_bytes_total{direction="sent"} 10.0',
        'pdserve_prefix_store_transfer_bytes_total{direction="received"} 30.0',
    ):
        assert expected in lines, expected
