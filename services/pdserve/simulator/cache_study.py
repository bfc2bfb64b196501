"""Hit rates of one cache that every request shares, by capacity: what a cluster tier of that size could save at
best."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from pdserve.core.blocks import BlockPool
from pdserve.simulator.request import block_hashes
from pdserve.simulator.workload import Arrival


def hit_rate(arrivals: Iterable[Arrival], capacity_tokens: int, block_tokens: int) -> float:
    """The share of prompt blocks found in one least-recently-used cache of `capacity_tokens`, each request stored
    whole.

    The cache is an engine's block pool: ends of prompts go before their beginnings. Only full blocks count.
    """
    pool = BlockPool(max(1, capacity_tokens // block_tokens))
    hits = total = 0
    for arrival in arrivals:
        hashes = block_hashes(arrival, block_tokens)
        total += len(hashes)
        found = pool.match(hashes)
        hits += len(found)
        pool.acquire(found)
        room = min(len(hashes) - len(found), pool.num_available)
        fresh = pool.allocate(room)
        for block, digest in zip(fresh, hashes[len(found) :], strict=False):
            pool.publish(block, digest)
        pool.release([*found, *fresh])
    return hits / total if total else 0.0


def prefill_seconds(
    arrivals: Sequence[Arrival], constant: float, linear: float, square: float, *, cached: bool
) -> float:
    """Mean seconds of prefill a request: constant + linear (n - p) + square (n^2 - p^2), n tokens of which p are
    cached.

    `cached`: in a cache that holds everything that came before; else p is 0.
    """
    held = repeated_tokens(arrivals) if cached else itertools.repeat(0)
    total = 0.0
    for arrival, p in zip(arrivals, held, strict=False):
        n = arrival.prompt
        total += constant + linear * (n - p) + square * (n * n - p * p)
    return total / len(arrivals)


def repeated_tokens(arrivals: Iterable[Arrival]) -> Iterator[int]:
    """Of each prompt, the tokens from its beginning on that a cache of everything before holds; never the last one."""
    seen: set[int] = set()
    for arrival in arrivals:
        leading = itertools.takewhile(seen.__contains__, arrival.block_ids)
        held = arrival.block_tokens * sum(1 for _ in leading)
        seen.update(arrival.block_ids)
        yield min(held, arrival.prompt - 1)
