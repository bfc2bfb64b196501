"""Measuring a link with frames that nobody keeps, beside whatever else it carries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

PROBE_TICKET = ""  # frames of it are received and dropped
SMALL = 64  # bytes of the frame that measures the round trip
ROUND_TRIPS = 5
WARM_UP = 2  # frames of each size that are not counted
MAX_FRAMES = 4096  # of each size
PARTS = 3  # of the frames of a size, of whose rates the median counts: one part may be held up
PATIENCE = 45.0  # seconds for a whole probe

# (seconds of a small frame's round trip, (frame bytes, bytes a second) for each size)
Done = Callable[[float, list[tuple[int, float]]], None]


def default_sizes(largest: int) -> list[int]:
    """Powers of two from 64 KiB up to `largest`, which is the last."""
    return [size for size in (1 << shift for shift in range(16, 40)) if size < largest] + [largest]


class Probe:
    """Which frame goes next, and what came of it; times are seconds on any steady clock.

    Small frames go one by one, for the round trip; then frames of each size as fast as credit comes back. From the
    announcement of the first that counts until the last one's credit is back time is taken in PARTS, each until the
    credit of its last frame is back. A sample waits for the one before it. What is not measured within PATIENCE is left
    out.
    """

    def __init__(self, sizes: Sequence[int], bytes_per_size: int, done: Done, now: float) -> None:
        counts = [(size, WARM_UP + min(MAX_FRAMES, max(2, bytes_per_size // size))) for size in sizes]
        self._plan = [(SMALL, ROUND_TRIPS), *counts]
        self._done = done
        self._deadline = now + PATIENCE
        self._round_trips: list[float] = []
        self._samples: list[tuple[int, float]] = []
        self._sent = self._landed = 0
        self._began = 0.0
        self._parts: list[float] = []  # bytes a second

    @property
    def over(self) -> bool:
        return not self._plan

    def next_size(self) -> int:
        """Bytes of the next frame; 0: none now."""
        if self.over or self._sent == self._plan[0][1]:
            return 0
        one_by_one = not self._round_trips or len(self._round_trips) < ROUND_TRIPS
        return 0 if one_by_one and self._sent > self._landed else self._plan[0][0]

    def sent(self, now: float) -> None:
        """A frame was announced."""
        self._sent += 1
        if len(self._round_trips) < ROUND_TRIPS or self._sent == WARM_UP + 1:
            self._began = now

    def landed(self, now: float) -> None:
        """A frame's credit is back. At the last one `done` is called; afterwards nothing more happens."""
        if self.over:
            return
        self._landed += 1
        size, count = self._plan[0]
        if len(self._round_trips) < ROUND_TRIPS:
            self._round_trips.append(now - self._began)
        else:
            self._take_part(size, count - WARM_UP, now)
        if self._landed == count:
            del self._plan[0]
            self._sent = self._landed = 0
        if now >= self._deadline:
            self._plan.clear()
        if self.over:
            self._done(sorted(self._round_trips)[len(self._round_trips) // 2], self._samples)

    def _take_part(self, size: int, counting: int, now: float) -> None:
        """Of `counting` frames that count one more has landed."""
        landed, parts = self._landed - WARM_UP, min(PARTS, counting)
        taken = len(self._parts)
        if landed < (end := counting * (taken + 1) // parts):
            return
        frames = end - counting * taken // parts
        self._parts.append(size * frames / max(1e-9, now - self._began))
        self._began = now
        if landed == counting:
            self._samples.append((size, sorted(self._parts)[(len(self._parts) - 1) // 2]))
            self._parts = []
