"""Steps in which nothing but the same answers is decoded, taken together: each a little longer than the one before."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdserve.simulator.request import Job

# Gaps of a run whose steps grow by less than this share are counted as one length, their mean.
GRAIN = 0.01


@dataclass(slots=True)
class Run:
    """Decoding `answers` alone, from `begin`: step i takes `first` + i x `growth` seconds, `steps` of them unless it is
    cut. `context` tokens have KV when it begins."""

    begin: float
    first: float
    growth: float
    steps: int
    answers: list[Job]
    context: int

    def until(self, steps: int) -> float:
        """Seconds that the first `steps` take."""
        return steps * self.first + self.growth * steps * (steps - 1) / 2

    def steps_by(self, now: float) -> int:
        """How many steps have ended or are under way at `now`, so that a cut lets the one under way end."""
        elapsed = now - self.begin
        if elapsed <= 0:
            return 0
        if self.growth <= 0:
            count = elapsed / self.first
        else:  # growth/2 k^2 + (first - growth/2) k = elapsed
            b = self.first - self.growth / 2
            count = (-b + math.sqrt(b * b + 2 * self.growth * elapsed)) / self.growth
        return min(self.steps, math.ceil(count - 1e-9))

    def gaps(self, done: int) -> list[tuple[float, int]]:
        """The lengths of the steps after the first `done`, those within GRAIN of one another as their mean."""
        gaps = []
        while done < self.steps:
            now = self.first + done * self.growth
            count = self.steps - done
            if self.growth > 0:
                count = min(count, max(1, int(GRAIN * now / self.growth)))
            gaps.append(((self.until(done + count) - self.until(done)) / count, count))
            done += count
        return gaps
