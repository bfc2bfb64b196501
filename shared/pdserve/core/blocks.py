"""The block pool: which pages are free, cached or owned. One engine loop owns it; there are no locks.

A block is exactly one of
- free: no content worth keeping;
- cached: nobody references it, its content is addressed by hash, evicted least recently used first;
- owned: referenced by one or more block tables. A full one may be in the hash index too, so that others share it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

from pdserve.core.errors import IntegrityError, NoCapacity


class BlockPool:
    """Reference-counted blocks with a hash index over the full ones.

    It notes which hashes entered and left the index since `take_changes` was last called.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._changes: dict[bytes, bool] = {}  # hash -> whether it is in the index now

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now: free ones, and cached ones after evicting them."""
        return len(self._free) + len(self._cached)

    @property
    def num_owned(self) -> int:
        return self.num_blocks - self.num_available

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest leading run of `hashes` in the index. Changes nothing."""
        blocks = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def available_after(self, pinned: Sequence[int]) -> int:
        """What `num_available` would be once the blocks in `pinned` were acquired."""
        return self.num_available - sum(1 for block in pinned if not self._references[block])

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that `match` returned. The caller must release each again."""
        for block in blocks:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks with one reference each, evicting cached ones when no free ones are left.

        Raises NoCapacity, and changes nothing, when there are too few.
        """
        if count > self.num_available:
            raise NoCapacity(f"{count} KV blocks wanted, {self.num_available} of {self.num_blocks} available")
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.popleft()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference from each block. The last one makes it cached (if it has a hash) or free.

        Tails go first, so that eviction takes the end of a chain before its beginning.
        """
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise IntegrityError(f"block {block} released more often than acquired")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def publish(self, block: int, digest: bytes) -> None:
        """Make an owned, full block findable by its hash. The first block with a hash keeps it."""
        if digest in self._block_of or block in self._hash_of:
            return
        if not self._references[block]:
            raise IntegrityError(f"block {block} published without an owner")
        self._hash_of[block] = digest
        self._block_of[digest] = block
        self._changes[digest] = True

    def clear_cache(self) -> None:
        """Forget every cached block."""
        while self._cached:
            block, _ = self._cached.popitem()
            self._forget(block)
            self._free.append(block)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Hashes stored and removed since the last call. One that was both in between stands where it ended."""
        changes, self._changes = self._changes, {}
        stored = [digest for digest, present in changes.items() if present]
        return stored, [digest for digest, present in changes.items() if not present]

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise IntegrityError unless the books add up and references are exactly those of `tables`."""
        counts = Counter(block for table in tables for block in table)
        free, cached = set(self._free), set(self._cached)
        owned = {block for block, count in enumerate(self._references) if count}
        problems = []
        if len(free) != len(self._free):
            problems.append("a block is free twice")
        if free & cached or free & owned or cached & owned or len(free | cached | owned) != self.num_blocks:
            problems.append(f"free {len(free)} + cached {len(cached)} + owned {len(owned)} != total {self.num_blocks}")
        if any(self._references[block] != counts[block] for block in range(self.num_blocks)):
            wrong = [b for b in range(self.num_blocks) if self._references[b] != counts[b]]
            problems.append(f"blocks {wrong[:8]} have references that no table accounts for")
        if any(self._block_of.get(digest) != block for block, digest in self._hash_of.items()):
            problems.append("hash index and its reverse differ")
        if len(self._hash_of) != len(self._block_of) or cached - self._hash_of.keys() or free & self._hash_of.keys():
            problems.append("a cached block without a hash, or a free one with one")
        if problems:
            raise IntegrityError("; ".join(problems))

    def _forget(self, block: int) -> None:
        digest = self._hash_of.pop(block)
        del self._block_of[digest]
        self._changes[digest] = False
