"""What this router has placed on one worker and has not seen the end of.

One Ledger lives as long as one connection to a worker, so that a worker that comes back starts from nothing, and what
was placed before cannot be taken off twice.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Ledger:
    """Sums over the open entries. Only entries change them."""

    outstanding_tokens: int = 0
    prefill_tokens: int = 0
    in_flight_blocks: int = 0
    sequences: int = 0
    placed: int = 0
    _settled_blocks: int = 0

    def add(self, tokens: int, prefill_tokens: int, blocks: int) -> Entry:
        """Account for a sequence that is about to be sent. The caller must close the entry."""
        self.outstanding_tokens += tokens
        self.prefill_tokens += prefill_tokens
        self.in_flight_blocks += blocks
        self.sequences += 1
        self.placed += 1
        return Entry(self, tokens, prefill_tokens, blocks)

    def reported(self) -> None:
        """The worker sent its load: blocks whose reservation it confirmed before are in there."""
        self.in_flight_blocks -= self._settled_blocks
        self._settled_blocks = 0


@dataclass(slots=True, eq=False)
class Entry:
    """One sequence on one worker."""

    _ledger: Ledger
    _tokens: int
    _prefill_tokens: int
    _blocks: int
    _open: bool = True

    def prefilled(self) -> None:
        """The first token came: nothing of the prompt waits any more."""
        self._ledger.prefill_tokens -= self._prefill_tokens
        self._prefill_tokens = 0

    def settled(self) -> None:
        """The worker holds the blocks: its next report counts them, so from then on the router does not."""
        if not self._open:
            return
        self._ledger._settled_blocks += self._blocks
        self._blocks = 0

    def close(self) -> None:
        """The worker is done with it, or never got it. May be called again."""
        if not self._open:
            return
        self._open = False
        self.prefilled()
        self._ledger.outstanding_tokens -= self._tokens
        self._ledger.in_flight_blocks -= self._blocks
        self._ledger.sequences -= 1
