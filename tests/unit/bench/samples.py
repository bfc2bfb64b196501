"""Records of what a client might have seen, for tests of what is made of them."""

from __future__ import annotations

from pdserve.bench.record import Record, Told
from pdserve.simulator.workload import Arrival


def record(
    *stamps: tuple[float, int],
    at: float = 0.0,
    number: int = 0,
    prompt: int = 10,
    output: int | None = None,
    ended: float | None = None,
    error: str | None = None,
    told: Told | None = None,
) -> Record:
    """A request whose tokens came at `stamps` (seconds of the run, how many), sent when it was due."""
    count = sum(tokens for _, tokens in stamps)
    end = (stamps[-1][0] if stamps else at) if ended is None else ended
    made = Record(number, Arrival(at, prompt, count if output is None else output), at, lambda: end, sent=at)
    for now, tokens in stamps:
        made.take(tokens, now=now)
    made.ended, made.error, made.told = end, error, told
    return made
