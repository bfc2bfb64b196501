"""Where the time of a request went: arithmetic on stamps, in nanoseconds of one monotonic clock.

    arrived -queue-> dispatched -reserve-> computing -prefill-> first
    first -transfer exposed-> complete -decode wait-> stepping -first step-> second

The upper three make the time to first token, the lower three the first gap between tokens. Each is what it added to
the wait, so they never overlap: what computing hid of a reservation or a transfer is in none of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stages:
    """Nanoseconds. What was not reached is 0."""

    queue: int = 0
    reserve: int = 0
    prefill: int = 0
    transfer_exposed: int = 0
    decode_wait: int = 0
    first_step: int = 0

    @property
    def time_to_first_token(self) -> int:
        return self.queue + self.reserve + self.prefill

    @property
    def first_gap(self) -> int:
        """From the first token to the second."""
        return self.transfer_exposed + self.decode_wait + self.first_step


@dataclass(slots=True)
class Stamps:
    """What a router notes of a request; 0: not reached, not known. `computing` and `stepping` are durations: what a
    worker says that computing the prompt took, and the step that made the second token."""

    arrived: int = 0
    dispatched: int = 0
    reserved: int = 0
    computing: int = 0
    first: int = 0
    ready: int = 0
    stepping: int = 0
    second: int = 0

    def stages(self) -> Stages:
        """Cut the time up. Whatever the stamps are, the sums are exact: first - arrived, and second - first."""
        if not self.first:
            return Stages(queue=max(0, self.dispatched - self.arrived) if self.dispatched else 0)
        dispatched = _between(self.arrived, self.dispatched, self.first)
        known = [self.reserved] if self.reserved else []
        known += [self.first - self.computing] if self.computing else []
        computing = _between(dispatched, min(known, default=dispatched), self.first)
        before = Stages(dispatched - self.arrived, computing - dispatched, self.first - computing)
        if not self.second:
            return before
        second = max(self.first, self.second)
        complete = _between(self.first, self.ready, second)
        stepping = _between(complete, second - self.stepping, second) if self.stepping else second
        return Stages(
            before.queue,
            before.reserve,
            before.prefill,
            complete - self.first,
            stepping - complete,
            second - stepping,
        )


def _between(low: int, value: int, high: int) -> int:
    return min(max(low, value), high)
