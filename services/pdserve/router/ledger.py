"""What this router has placed on one worker, and what of it the worker's own reports don't show yet.

One Ledger lives as long as one connection to a worker, so that a worker that comes back starts from nothing, and what
was placed before cannot be taken off twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Work:
    """What a sequence is for one worker: its `tokens`, the prompt tokens to compute and their squares (see
    policy.estimate), the blocks that it takes, and whether somebody asked for its gaps to be `bounded`."""

    tokens: int
    prefill_tokens: int = 0
    prefill_squares: int = 0
    blocks: int = 0
    bounded: bool = False


@dataclass(slots=True)
class Ledger:
    """Sums over the open entries; the figures called in flight are those that no report shows yet. Only entries change
    them, and each time `on_change` is called."""

    on_change: Callable[[], None] = lambda: None
    outstanding_tokens: int = 0
    in_flight_tokens: int = 0
    in_flight_squares: int = 0
    in_flight_blocks: int = 0
    sequences: int = 0
    bounded: int = 0
    placed: int = 0
    _settled: list[Entry] = field(default_factory=list)

    def add(self, work: Work) -> Entry:
        """Account for a sequence that is about to be sent. The caller must close the entry."""
        self.outstanding_tokens += work.tokens
        self.sequences += 1
        self.bounded += work.bounded
        self.placed += 1
        self._fly(work, 1)
        return Entry(self, work)

    def reported(self) -> None:
        """The worker sent its load: what it had confirmed before is in there."""
        settled, self._settled = self._settled, []
        for entry in settled:
            entry.land()

    def _fly(self, work: Work, sign: int) -> None:
        self.in_flight_tokens += sign * work.prefill_tokens
        self.in_flight_squares += sign * work.prefill_squares
        self.in_flight_blocks += sign * work.blocks
        self.on_change()


@dataclass(slots=True, eq=False)
class Entry:
    """One sequence on one worker: in flight, until the worker has confirmed it and then sent a report."""

    _ledger: Ledger
    _work: Work
    _open: bool = True
    _flies: bool = True
    _confirmed: bool = False

    def settled(self) -> None:
        """The worker has it: its next report counts it, so from then on the router does not."""
        if self._open and not self._confirmed:
            self._confirmed = True
            self._ledger._settled.append(self)

    def prefilled(self) -> None:
        """The first token came: nothing of the prompt waits any more, whatever was reported."""
        work = self._work
        if self._flies and work.prefill_tokens:
            self._ledger._fly(Work(0, work.prefill_tokens, work.prefill_squares), -1)
            self._work = Work(work.tokens, blocks=work.blocks, bounded=work.bounded)

    def land(self) -> None:
        """A report has it. May be called again."""
        if self._flies:
            self._flies = False
            self._ledger._fly(self._work, -1)

    def close(self) -> None:
        """The worker is done with it, or never got it. May be called again."""
        if not self._open:
            return
        self._open = False
        self.land()
        self._ledger.outstanding_tokens -= self._work.tokens
        self._ledger.sequences -= 1
        self._ledger.bounded -= self._work.bounded
        self._ledger.on_change()
