"""What the router remembers from request to request, in bounded memory: where conversations were, how long answers
are, how fast the queue moves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from pdserve.router.assignment import Assignment

REMEMBERED = 1 << 15  # conversations, some 100 bytes each
_EWMA = 0.2
_ANSWERS = 0.02  # weight of the newest answer
_RETRY_MIN, _RETRY_MAX = 0.1, 30.0  # seconds, bounds of what RetryInfo says


class Conversations:
    """The workers that had each conversation last, the latest conversations only. A hint between equals: what decides
    is where their KV is.

    They are kept in two generations, of which the older one goes as a whole: from `size` / 2 to `size` are remembered.
    Names are kept as their hashes: two that share one would share a hint.
    """

    def __init__(self, size: int = REMEMBERED) -> None:
        self._size = size
        self._young: dict[int, frozenset[str]] = {}
        self._old: dict[int, frozenset[str]] = {}

    def near(self, session: str) -> frozenset[str]:
        """Ids of the workers; empty for an unknown conversation, and for a request that names none."""
        key = hash(session)
        return self._young.get(key) or self._old.get(key, frozenset())

    def note(self, session: str, assignment: Assignment) -> None:
        """Its latest turn goes there."""
        if not session:
            return
        if len(self._young) >= self._size // 2:
            self._young, self._old = {}, self._young
        prefill, decode = assignment.prefill, assignment.decode
        self._young[hash(session)] = _together(prefill and prefill.worker_id, decode and decode.worker_id)


@lru_cache(maxsize=4096)  # conversations of one pair share it
def _together(*workers: str | None) -> frozenset[str]:
    return frozenset(worker for worker in workers if worker is not None)


@dataclass(slots=True)
class Pace:
    """One model's. `interval` are seconds between placements while somebody waits, `answer` the tokens of answers, both
    smoothed; 0: nothing is known."""

    interval: float = 0.0
    answer: float = 0.0
    _placed: float | None = None

    def placed(self, now: float, *, others_wait: bool) -> None:
        """One left the queue for a worker."""
        if self._placed is not None:
            seconds = now - self._placed
            self.interval += _EWMA * (seconds - self.interval) if self.interval else seconds
        self._placed = now if others_wait else None

    def idle(self) -> None:
        """Nobody waits: the time to the next placement says nothing."""
        self._placed = None

    def answered(self, tokens: int) -> None:
        """An answer has ended, of so many tokens."""
        self.answer += _ANSWERS * (tokens - self.answer) if self.answer else tokens

    def retry_after(self, waiting: int) -> float:
        """Seconds until a new request would probably be placed, at the pace of the latest placements."""
        expected = (self.interval or 1.0) * (waiting + 1)
        return min(_RETRY_MAX, max(_RETRY_MIN, expected))
