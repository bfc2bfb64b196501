"""Whether to load KV from the prefix-cache service or to compute it, from rates that were measured on the way.

Cached tokens that cost more to load than to compute are no gain, and everybody who counted them as one regretted it.
"""

from __future__ import annotations

from dataclasses import dataclass

# Loading must beat computing by this much, because both are estimates and loading also costs the cache's time.
MARGIN = 0.9
# The newest measurement's weight in an estimate.
WEIGHT = 0.3


@dataclass(frozen=True, slots=True)
class Decision:
    fetch: bool
    reason: str


@dataclass(slots=True)
class Rate:
    """Amount per second, as an exponential mean. An estimate older than `max_age` seconds counts as unknown, so that
    what was slow once is tried again."""

    max_age: float = 60.0
    _value: float = 0.0
    _measured: float | None = None

    def update(self, amount: float, seconds: float, now: float) -> None:
        """Take in one measurement. `now` is in seconds, of any clock that does not jump."""
        if amount <= 0 or seconds <= 0:
            return
        rate = amount / seconds
        known = self.value(now)
        self._value = rate if known is None else known + WEIGHT * (rate - known)
        self._measured = now

    def value(self, now: float) -> float | None:
        if self._measured is None or now - self._measured > self.max_age:
            return None
        return self._value


def should_fetch(*, tokens: int, size: int, fetch_rate: float | None, compute_rate: float | None) -> Decision:
    """Decide for `tokens` tokens whose KV is `size` bytes. Rates are bytes per second (as seen by requests, latency
    included) and tokens per second; None: unknown. What is unknown is tried, for otherwise it stays unknown."""
    if tokens <= 0 or size <= 0:
        return Decision(False, "nothing to fetch")
    if fetch_rate is None:
        return Decision(True, "fetch rate unknown, measuring it")
    if compute_rate is None:
        return Decision(True, "compute rate unknown")
    fetch_seconds, compute_seconds = size / fetch_rate, tokens / compute_rate
    if fetch_seconds < MARGIN * compute_seconds:
        return Decision(True, f"{1e3 * fetch_seconds:.1f} ms to fetch, {1e3 * compute_seconds:.1f} ms to compute")
    return Decision(False, f"{1e3 * compute_seconds:.1f} ms to compute, {1e3 * fetch_seconds:.1f} ms to fetch")
