"""The block store is bounded, evicts the least recently used, and never hands out rotten blocks."""

from __future__ import annotations

import zlib

from pdserve.prefix_cache.store import BlockStore, Stored


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def put(store: BlockStore, number: int, size: int = 100) -> Stored:
    payload = bytes([number]) * size
    return store.put(digest(number), payload, zlib.crc32(payload))


def test_a_block_comes_back_as_it_was() -> None:
    store = BlockStore(1000)
    assert put(store, 1) is Stored.STORED and put(store, 1) is Stored.PRESENT
    assert store.get(digest(1)) == (b"\x01" * 100, zlib.crc32(b"\x01" * 100))
    assert store.get(digest(2)) is None
    assert (store.hits, store.misses, store.used, len(store)) == (1, 1, 100, 1)


def test_leading_stops_at_the_first_gap() -> None:
    store = BlockStore(1000)
    for number in (1, 2, 4):
        put(store, number)
    assert store.leading([digest(n) for n in (1, 2, 3, 4)]) == 2
    assert store.leading([digest(3)]) == 0 and store.leading([]) == 0


def test_memory_is_bounded_and_ends_of_chains_go_first() -> None:
    store = BlockStore(300)
    chain = [digest(n) for n in (1, 2, 3)]
    for number in (1, 2, 3):
        put(store, number)
    store.touch(chain)
    assert put(store, 4) is Stored.STORED
    assert store.used == 300 and store.evicted == 1 and store.leading(chain) == 2
    assert put(store, 5, 250) is Stored.STORED and store.used == 250 and len(store) == 1


def test_what_cannot_be_kept_is_refused() -> None:
    store = BlockStore(300)
    assert put(store, 1, 301) is Stored.REFUSED and put(store, 1, 0) is Stored.REFUSED
    assert store.put(b"short", b"x", zlib.crc32(b"x")) is Stored.REFUSED
    assert store.put(digest(1), b"x", 0) is Stored.REFUSED
    assert store.corrupt == 1 and store.used == 0


def test_a_block_that_rots_is_dropped_instead_of_served() -> None:
    store = BlockStore(300)
    put(store, 1)
    store._blocks[digest(1)] = (b"\x02" * 100, store._blocks[digest(1)][1])
    assert store.get(digest(1)) is None
    assert store.corrupt == 1 and store.used == 0 and len(store) == 0
