"""Blocks in memory, bounded in bytes, the least recently used evicted first. Checksums are verified on both ways."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import Enum

from pdserve.core.hashing import HASH_BYTES


class Stored(Enum):
    """What became of a block that was offered."""

    STORED = "stored"
    PRESENT = "present"
    REFUSED = "refused"


class BlockStore:
    """Payloads by hash. Used from one event loop; nothing here waits."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.hits = 0
        self.misses = 0
        self.evicted = 0
        self.corrupt = 0
        self._blocks: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def leading(self, hashes: Iterable[bytes]) -> int:
        """How many of `hashes`, from the first on, are here. Counts as no use."""
        count = 0
        for digest in hashes:
            if digest not in self._blocks:
                break
            count += 1
        return count

    def get(self, digest: bytes) -> tuple[bytes, int] | None:
        """Payload and CRC-32 of a block; None for one that is missing, or rotten (which is dropped and counted)."""
        found = self._blocks.get(digest)
        if found is None:
            self.misses += 1
            return None
        if zlib.crc32(found[0]) != found[1]:
            self.corrupt += 1
            self._drop(digest)
            return None
        self.hits += 1
        return found

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Mark a chain as just used, its end first, so that eviction takes ends before beginnings."""
        for digest in reversed(hashes):
            if digest in self._blocks:
                self._blocks.move_to_end(digest)

    def put(self, digest: bytes, payload: bytes, crc32: int) -> Stored:
        """Keep a block, evicting others as needed. Refused: not a hash, empty, rotten on arrival, or too big."""
        if digest in self._blocks:
            return Stored.PRESENT
        if len(digest) != HASH_BYTES or not 0 < len(payload) <= self.capacity:
            return Stored.REFUSED
        if zlib.crc32(payload) != crc32:
            self.corrupt += 1
            return Stored.REFUSED
        while self.used + len(payload) > self.capacity:
            self._drop(next(iter(self._blocks)))
            self.evicted += 1
        self._blocks[digest] = (payload, crc32)
        self.used += len(payload)
        return Stored.STORED

    def _drop(self, digest: bytes) -> None:
        self.used -= len(self._blocks.pop(digest)[0])
