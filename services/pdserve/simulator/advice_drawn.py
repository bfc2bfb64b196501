"""Requests drawn from what a running suite counts: histograms of lengths, and a rate."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pdserve.simulator.workload import Arrival


@dataclass(frozen=True, slots=True)
class Histogram:
    """Tokens by buckets: `counts[i]` values lie above `bounds[i - 1]` and up to `bounds[i]`; the last bound may be
    infinite."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]

    @property
    def total(self) -> float:
        return sum(self.counts)

    def draw(self, rng: random.Random) -> int:
        """A bucket by its share, and within it a length whose logarithm is uniform: buckets grow by factors. Beyond the
        last finite bound, up to twice as much."""
        sums = list(accumulate(self.counts))
        index = bisect_left(sums, rng.uniform(0, sums[-1]))
        while not self.counts[index]:  # drawn right on the edge of an empty one
            index += 1
        low = self.bounds[index - 1] if index else 0.0
        high = self.bounds[index] if math.isfinite(self.bounds[index]) else 2 * low
        first = min(math.floor(low) + 1, math.floor(high))
        return max(1, round(math.exp(rng.uniform(math.log(max(1, first)), math.log(max(1.0, high))))))


def drawn(prompts: Histogram, outputs: Histogram, rate: float, count: int, seed: int) -> Sequence[Arrival]:
    """`count` requests of a Poisson process of `rate` a second. Nobody counts which prompts had which answers, so their
    lengths are independent, and nobody counts prefixes, so none is shared. Same seed, same requests."""
    rng, at, made = random.Random(seed), 0.0, list[Arrival]()
    for _ in range(count):
        made.append(Arrival(at, prompts.draw(rng), outputs.draw(rng)))
        at += rng.expovariate(rate)
    return made
