"""Percentiles of a stream of values, over all of it or over its last minute, in bounded memory. Values only, no clock.

Values fall into buckets of 4% width, so that a quantile is at most 2% off, whatever the scale.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_GROWTH = math.log(1.04)
_LEAST = 1e-9  # what is smaller counts as this
_HALF = math.exp(_GROWTH / 2)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """What a collection of values came to; all 0 where there are none. Units are those of the values."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    greatest: float = 0.0


def quantiles_of(values: Sequence[float]) -> Quantiles:
    """The exact ones, of values that are all there (nearest rank)."""
    if not values:
        return Quantiles()
    ordered, count = sorted(values), len(values)
    p50, p90, p99 = (ordered[max(1, math.ceil(share * count)) - 1] for share in (0.5, 0.9, 0.99))
    return Quantiles(count, sum(ordered) / count, p50, p90, p99, ordered[-1])


class Histogram:
    """Counts by bucket. Buckets come into being as they are needed: some dozens for one kind of latency."""

    __slots__ = ("_buckets", "count", "greatest", "total")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self.count = 0
        self.total = 0.0
        self.greatest = 0.0

    def add(self, value: float) -> None:
        """Take in one value, 0 or more."""
        bucket = int(math.log(max(value, _LEAST)) // _GROWTH)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self.count += 1
        self.total += value
        self.greatest = max(self.greatest, value)

    def merge(self, other: Histogram) -> None:
        """Take in what `other` has."""
        for bucket, count in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count
        self.count += other.count
        self.total += other.total
        self.greatest = max(self.greatest, other.greatest)

    def quantile(self, share: float) -> float:
        """The value that `share` of all do not exceed (nearest rank); 0 without values."""
        rank, seen = max(1, math.ceil(share * self.count)), 0
        if rank >= self.count:
            return self.greatest
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                return min(self.greatest, math.exp(bucket * _GROWTH) * _HALF)
        raise AssertionError("fewer values than were counted")

    def quantiles(self) -> Quantiles:
        if not self.count:
            return Quantiles()
        p50, p90, p99 = (self.quantile(share) for share in (0.5, 0.9, 0.99))
        return Quantiles(self.count, self.total / self.count, p50, p90, p99, self.greatest)


class Window:
    """The values of the last `seconds`, in parts that expire one after the other.

    `now` is in seconds of any clock that never goes back; `began` is when the window was made, by the same clock.
    """

    def __init__(self, began: float, seconds: float = 60.0, parts: int = 12) -> None:
        self._began, self._width, self._parts = began, seconds / parts, parts
        self._slots: deque[tuple[int, Histogram]] = deque()

    def add(self, now: float, value: float) -> None:
        """Take in one value that came now."""
        slot = int(now // self._width)
        if not self._slots or self._slots[-1][0] < slot:
            self._expire(slot)
            self._slots.append((slot, Histogram()))
        self._slots[-1][1].add(value)

    def merged(self, now: float) -> Histogram:
        """All values of the window as one histogram, which is the caller's."""
        self._expire(int(now // self._width))
        merged = Histogram()
        for _, histogram in self._slots:
            merged.merge(histogram)
        return merged

    def covered(self, now: float) -> float:
        """For how many seconds the window can have values: what turns its sums into rates. Above 0."""
        oldest = (now // self._width - self._parts + 1) * self._width
        return max(self._width / 100, now - max(self._began, oldest))

    def _expire(self, slot: int) -> None:
        while self._slots and self._slots[0][0] <= slot - self._parts:
            self._slots.popleft()
