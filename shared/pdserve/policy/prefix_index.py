"""Which workers hold which blocks: an index from block hash to holders, bounded, kept from what workers report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PrefixIndex:
    """Hashes are chained, so that a worker which holds a block can use it only with every block before it.

    `limit` bounds the hashes of one holder; beyond it the oldest are forgotten, which costs hits and never correctness.
    """

    def __init__(self, limit: int = 1 << 20) -> None:
        self.limit = limit
        self._holders: dict[bytes, set[str]] = {}
        self._hashes: dict[str, dict[bytes, None]] = {}

    def update(self, holder: str, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Note what entered and left `holder`'s cache. A hash in both counts as removed, the safe side."""
        hashes = self._hashes.setdefault(holder, {})
        for digest in stored:
            hashes[digest] = None
            self._holders.setdefault(digest, set()).add(holder)
        for digest in removed:
            if digest in hashes:
                del hashes[digest]
                self._forget(holder, digest)
        while len(hashes) > self.limit:
            oldest = next(iter(hashes))
            del hashes[oldest]
            self._forget(holder, oldest)

    def drop(self, holder: str) -> None:
        """Forget everything about `holder`: it is gone, or another incarnation."""
        for digest in self._hashes.pop(holder, {}):
            self._forget(holder, digest)

    def leading(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Holder -> how many of the first `hashes` it has without a gap. Holders of none are left out."""
        counts: dict[str, int] = {}
        alive: set[str] = set()
        for index, digest in enumerate(hashes):
            holders = self._holders.get(digest)
            still = set() if holders is None else set(holders) if index == 0 else alive & holders
            if len(still) != len(alive) and index:
                counts.update(dict.fromkeys(alive - still, index))
            alive = still
            if not alive:
                break
        counts.update(dict.fromkeys(alive, len(hashes)))
        return counts

    def _forget(self, holder: str, digest: bytes) -> None:
        holders = self._holders[digest]
        holders.discard(holder)
        if not holders:
            del self._holders[digest]
