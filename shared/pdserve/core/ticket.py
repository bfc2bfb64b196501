"""A ticket's life on the decode side: the states, the moves between them, and what has landed.

The table below is the whole truth: a move that is not in it raises. Pages belong to the ticket from RESERVED until
FREED, whatever happens in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pdserve.core.errors import IntegrityError


class TicketState(StrEnum):
    RESERVED = "reserved"
    RECEIVING = "receiving"
    READY = "ready"
    DECODING = "decoding"
    HANDING_OFF = "handing_off"
    DONE = "done"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    FAILED = "failed"
    FREED = "freed"


_S = TicketState
_BREAKS = frozenset({_S.CANCELLED, _S.FAILED})

MOVES: dict[TicketState, frozenset[TicketState]] = {
    _S.RESERVED: frozenset({_S.RECEIVING, _S.READY}) | _BREAKS,
    _S.RECEIVING: frozenset({_S.RESERVED, _S.READY}) | _BREAKS,  # back to RESERVED: a new attempt
    _S.READY: frozenset({_S.DECODING}) | _BREAKS,
    _S.DECODING: frozenset({_S.DONE, _S.PREEMPTED, _S.HANDING_OFF}) | _BREAKS,
    _S.HANDING_OFF: frozenset({_S.DONE, _S.DECODING}) | _BREAKS,
    _S.DONE: frozenset({_S.FREED}),
    _S.PREEMPTED: frozenset({_S.FREED}),
    _S.CANCELLED: frozenset({_S.FREED}),
    _S.FAILED: frozenset({_S.FREED}),
    _S.FREED: frozenset(),
}


@dataclass(slots=True)
class Landing:
    """Which KV of one attempt is in its pages. Tokens of a layer land in order, layers in any order."""

    num_layers: int
    first: int
    end: int
    frames: int = 0
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [self.first] * self.num_layers

    def accept(self, number: int, layer_start: int, layer_count: int, token_start: int, token_count: int) -> None:
        """Count a frame whose bytes are in their pages. Raises IntegrityError for one that does not fit.

        A frame fits when it is the next by number and, in each of its layers, starts where the last one ended.
        """
        layers = range(layer_start, layer_start + layer_count)
        if number != self.frames:
            raise IntegrityError(f"frame {number} came where {self.frames} was due")
        if not (layer_start >= 0 and layer_count > 0 and token_count > 0 and layers.stop <= self.num_layers):
            raise IntegrityError(f"frame {number} has layers {layers.start} to {layers.stop} of {self.num_layers}")
        token_end = token_start + token_count
        if token_end > self.end or any(self.tokens[layer] != token_start for layer in layers):
            raise IntegrityError(f"frame {number} has tokens {token_start} to {token_end}, which are not next")
        self.frames += 1
        for layer in layers:
            self.tokens[layer] = token_end

    @property
    def complete(self) -> bool:
        return all(landed == self.end for landed in self.tokens)


@dataclass(slots=True)
class Ticket:
    """One reservation on a decode worker."""

    id: str
    attempt: int
    landing: Landing
    state: TicketState = TicketState.RESERVED
    first_token: int | None = None
    frame_count: int | None = None

    def move(self, state: TicketState) -> None:
        """Go to `state`, or raise IntegrityError where the table does not allow it."""
        if state not in MOVES[self.state]:
            raise IntegrityError(f"ticket {self.id} cannot go from {self.state} to {state}")
        self.state = state

    def commit(self, frame_count: int, first_token: int) -> None:
        """Note the end of the attempt's frames, as its sender counts them."""
        self.frame_count, self.first_token = frame_count, first_token

    @property
    def ready(self) -> bool:
        """Everything was committed and everything is in its page. Raises IntegrityError where the counts contradict."""
        if self.frame_count is None:
            return False
        if self.landing.frames > self.frame_count:
            raise IntegrityError(f"{self.landing.frames} frames landed, {self.frame_count} were committed")
        if self.landing.frames == self.frame_count and not self.landing.complete:
            raise IntegrityError(f"all {self.frame_count} frames landed, but not all tokens of all layers")
        return self.landing.complete and self.landing.frames == self.frame_count
