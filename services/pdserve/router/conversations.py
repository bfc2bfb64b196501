"""What the router remembers from request to request, in bounded memory: where conversations were, how long answers
are, how fast the queue moves."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from pdserve.router.assignment import Assignment

REMEMBERED = 1 << 16
_EWMA = 0.2
_ANSWERS = 0.02  # weight of the newest answer
_RETRY_MIN, _RETRY_MAX = 0.1, 30.0  # seconds, bounds of what RetryInfo says


class Conversations:
    """The workers that had each conversation last, the latest conversations only. A hint between equals: what decides
    is where their KV is."""

    def __init__(self, size: int = REMEMBERED) -> None:
        self._size = size
        self._near: OrderedDict[str, frozenset[str]] = OrderedDict()

    def near(self, session: str) -> frozenset[str]:
        """Ids of the workers; empty for an unknown conversation, and for a request that names none."""
        return self._near.get(session, frozenset())

    def note(self, session: str, assignment: Assignment) -> None:
        """Its latest turn goes there."""
        if not session:
            return
        workers = (assignment.prefill, assignment.decode)
        self._near[session] = frozenset(worker.worker_id for worker in workers if worker is not None)
        self._near.move_to_end(session)
        while len(self._near) > self._size:
            self._near.popitem(last=False)


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
