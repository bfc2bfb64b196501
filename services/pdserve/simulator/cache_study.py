"""Hit rates of one cache that every request shares, by capacity: what a cluster tier of that size could save at
best."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
    seen: set[int] = set()
    total = 0.0
    for arrival in arrivals:
        held = 0
        if cached:
            for block in arrival.block_ids:
                if block not in seen:
                    break
                held += arrival.block_tokens
            seen.update(arrival.block_ids)
        held = min(held, arrival.prompt - 1)
        n = arrival.prompt
        total += constant + linear * (n - held) + square * (n * n - held * held)
    return total / len(arrivals)
