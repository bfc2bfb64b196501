"""Who computes how many tokens in one engine step, and who has to go when the pages run out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Work(NamedTuple):
    """One sequence's wish: `pending` tokens without KV; `prefill` while input is among them."""

    pending: int
    prefill: bool


def plan_step(work: Sequence[Work], budget: int) -> list[int]:
    """Tokens to compute for each of `work`, in its order.

    Running answers get one token each in every step, so that neither a prompt nor a small budget stalls a stream;
    prompts share what they leave of `budget`, in order, the first as much as fits (chunked prefill, Sarathi-Serve,
    arXiv:2403.02310).
    """
    counts = [0 if prefill else min(pending, 1) for pending, prefill in work]
    budget = max(budget - sum(counts), 1)  # prompts go on, if only by a token
    for index, (pending, prefill) in enumerate(work):
        if prefill and budget > 0:
            counts[index] = min(pending, budget)
            budget -= counts[index]
    return counts


class Claim(NamedTuple):
    """What a sequence's right to its pages rests on: higher priority first, then lower (older) order."""

    priority: int
    order: int


def choose_victim(claims: Sequence[Claim]) -> int:
    """Index of the sequence to preempt: lowest priority, then youngest. So the oldest always comes to its end."""
    return min(range(len(claims)), key=lambda index: (claims[index].priority, -claims[index].order))
