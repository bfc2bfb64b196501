"""Which workers hold which blocks: an index from block hash to holders, bounded, kept from what workers report.

Holders are the bits of one number a block, so that following a prompt's blocks costs one bitwise and each, however many
workers there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PrefixIndex:
    """Hashes are chained, so that a worker which holds a block can use it only with every block before it.

    `limit` bounds the hashes of one holder; beyond it the oldest are forgotten, which costs hits and never correctness.
    """

    def __init__(self, limit: int = 1 << 20) -> None:
        self.limit = limit
        self._masks: dict[bytes, int] = {}
        self._hashes: dict[str, dict[bytes, None]] = {}
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._free: list[int] = []

    def update(self, holder: str, stored: Iterable[bytes], removed: Iterable[bytes], limit: int | None = None) -> None:
        """Note what entered and left `holder`'s cache. A hash in both counts as removed, the safe side. `limit` is the
        holder's own bound, where that is lower."""
        hashes = self._hashes.setdefault(holder, {})
        bit = 1 << self._number(holder)
        for digest in stored:
            hashes[digest] = None
            self._masks[digest] = self._masks.get(digest, 0) | bit
        for digest in removed:
            if digest in hashes:
                del hashes[digest]
                self._forget(bit, digest)
        while len(hashes) > (self.limit if limit is None else min(limit, self.limit)):
            oldest = next(iter(hashes))
            del hashes[oldest]
            self._forget(bit, oldest)

    def drop(self, holder: str) -> None:
        """Forget everything about `holder`: it is gone, or another incarnation."""
        number = self._bits.pop(holder, None)
        if number is None:
            return
        for digest in self._hashes.pop(holder):
            self._forget(1 << number, digest)
        del self._names[number]
        self._free.append(number)

    def holds(self, holder: str) -> int:
        """How many blocks of `holder` it knows of."""
        return len(self._hashes.get(holder, ()))

    def leading(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Holder -> how many of the first `hashes` it has. Holders of none are left out.

        Takes caches for what engines' are: a block goes before those that it follows. So whoever has a block has what
        is before it, and the ends of all holders are found by halving; where one has a gap after all (its own bound
        here is lower than its cache), the count may be too high, and the prompt takes longer than predicted.
        """
        masks, names, counts = self._masks, self._names, dict[str, int]()
        alive = masks.get(hashes[0], 0) if hashes else 0
        ranges = [(1, len(hashes), alive)] if alive else []  # holders who have the first `low`, perhaps up to `high`
        while ranges:
            low, high, alive = ranges.pop()
            while low < high:
                middle = (low + high + 1) // 2
                further = alive & masks.get(hashes[middle - 1], 0)
                if not further:
                    high = middle - 1
                    continue
                if further != alive:
                    ranges.append((low, middle - 1, alive ^ further))
                low, alive = middle, further
            while alive:
                bit = alive & -alive
                counts[names[bit.bit_length() - 1]] = low
                alive ^= bit
        return counts

    def __len__(self) -> int:
        """How many different blocks it knows of."""
        return len(self._masks)

    def _number(self, holder: str) -> int:
        number = self._bits.get(holder)
        if number is None:
            number = self._bits[holder] = self._free.pop() if self._free else len(self._bits)
            self._names[number] = holder
        return number

    def _forget(self, bit: int, digest: bytes) -> None:
        left = self._masks[digest] & ~bit
        if left:
            self._masks[digest] = left
        else:
            del self._masks[digest]
