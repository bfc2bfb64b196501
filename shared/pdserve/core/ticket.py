"""A ticket's life on the decode side: its states, the events that move it, and what of an attempt has landed.

The table below is the whole truth: an event that a state does not know raises. Pages belong to the ticket from RESERVED
until FREED, whatever happens in between; only while it is RECEIVING may a peer write to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pdserve.core.errors import IntegrityError
from pdserve.core.sequence import EndReason


class TicketState(StrEnum):
    RESERVED = "reserved"  # has pages; computes its prompt here, or waits for an attempt
    RECEIVING = "receiving"  # the live attempt's peer fills the pages
    READY = "ready"  # all KV of the input is in its pages
    DECODING = "decoding"
    HANDING_OFF = "handing_off"  # made its last token here; another decode worker takes over, or it goes on
    DONE = "done"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    FAILED = "failed"
    FREED = "freed"


class TicketEvent(StrEnum):
    GRANT = "grant"  # an attempt begins
    ATTEMPT_FAIL = "attempt_fail"  # it is over without its KV, and its pages are quiet
    COMPLETE = "complete"  # every token of every layer is in its page, landed or computed here
    START = "start"
    HAND_OFF = "hand_off"
    RESUME = "resume"
    FINISH = "finish"
    PREEMPT = "preempt"
    CANCEL = "cancel"
    FAIL = "fail"
    FREE = "free"


_S, _E = TicketState, TicketEvent
_BREAKS = {_E.CANCEL: _S.CANCELLED, _E.FAIL: _S.FAILED}
_FREES = {_E.FREE: _S.FREED}

MOVES: dict[TicketState, dict[TicketEvent, TicketState]] = {
    _S.RESERVED: {_E.GRANT: _S.RECEIVING, _E.COMPLETE: _S.READY, _E.PREEMPT: _S.PREEMPTED, **_BREAKS},
    _S.RECEIVING: {_E.ATTEMPT_FAIL: _S.RESERVED, _E.COMPLETE: _S.READY, **_BREAKS},
    _S.READY: {_E.START: _S.DECODING, **_BREAKS},
    _S.DECODING: {
        _E.FINISH: _S.DONE,
        _E.PREEMPT: _S.PREEMPTED,
        _E.HAND_OFF: _S.HANDING_OFF,
        **_BREAKS,
    },
    _S.HANDING_OFF: {_E.FINISH: _S.DONE, _E.RESUME: _S.DECODING, **_BREAKS},
    _S.DONE: _FREES,
    _S.PREEMPTED: _FREES,
    _S.CANCELLED: _FREES,
    _S.FAILED: _FREES,
    _S.FREED: {},
}
_ENDINGS = {
    EndReason.STOP: _E.FINISH,
    EndReason.LENGTH: _E.FINISH,
    EndReason.HANDED_OFF: _E.FINISH,
    EndReason.PREEMPTED: _E.PREEMPT,
    EndReason.CANCELLED: _E.CANCEL,
    EndReason.DEADLINE: _E.CANCEL,
}


@dataclass(slots=True)
class Landing:
    """Which KV of one attempt is in its pages. Tokens of a layer land in order, layers in any order.

    Between `check` and `accept` of a frame no other frame of the attempt is checked: one thread copies them.
    """

    num_layers: int
    first: int
    end: int
    frames: int = 0
    tokens: list[int] = field(default_factory=list)
    frame_count: int | None = None

    def __post_init__(self) -> None:
        self.tokens = [self.first] * self.num_layers

    def check(self, number: int, layer_start: int, layer_count: int, token_start: int, token_count: int) -> None:
        """Before a frame is copied: raise IntegrityError where it does not fit. Changes nothing.

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

    def accept(self, number: int, layer_start: int, layer_count: int, token_start: int, token_count: int) -> None:
        """Count a frame whose bytes are in their pages now. Raises as `check` does."""
        self.check(number, layer_start, layer_count, token_start, token_count)
        self.frames += 1
        for layer in range(layer_start, layer_start + layer_count):
            self.tokens[layer] = token_start + token_count

    def commit(self, frame_count: int) -> None:
        """Note the end of the attempt's frames, as its sender counts them."""
        self.frame_count = frame_count

    @property
    def whole(self) -> int:
        """Leading tokens that are in their pages in all layers."""
        return min(self.tokens)

    @property
    def complete(self) -> bool:
        return self.whole == self.end

    @property
    def ready(self) -> bool:
        """Everything was committed and everything is in its page. Raises IntegrityError where the counts contradict."""
        if self.frame_count is None:
            return False
        if self.frames > self.frame_count:
            raise IntegrityError(f"{self.frames} frames landed, {self.frame_count} were committed")
        if self.frames == self.frame_count and not self.complete:
            raise IntegrityError(f"all {self.frame_count} frames landed, but not all tokens of all layers")
        return self.complete and self.frames == self.frame_count


@dataclass(slots=True)
class Ticket:
    """One reservation on a decode worker: an input of `end` tokens, of which `held` leading ones have their KV.

    Of its attempts only the newest counts. The words of older ones are fenced here: `attempt_failed` and `complete`
    say whether they were this attempt's, and change nothing where not.
    """

    id: str
    attempt: int
    end: int
    held: int = 0
    state: TicketState = TicketState.RESERVED
    first_token: int | None = None

    def on(self, event: TicketEvent) -> None:
        """Take in an event, or raise IntegrityError where the table does not know it in this state."""
        after = MOVES[self.state].get(event)
        if after is None:
            raise IntegrityError(f"ticket {self.id} is {self.state}, where nothing can {event}")
        self.state = after

    @property
    def waits_for_kv(self) -> bool:
        return self.state in (TicketState.RESERVED, TicketState.RECEIVING)

    @property
    def over(self) -> bool:
        """It has ended; its pages may still be waiting for a link to let go."""
        return self.state in _OVER

    def attempt_failed(self, attempt: int, landed: int) -> bool:
        """The attempt's KV will not come, its pages are quiet and hold `landed` leading tokens. The ticket stands."""
        if not self._live(attempt):
            return False
        self.on(TicketEvent.ATTEMPT_FAIL)
        self.held = max(self.held, landed)
        return True

    def complete(self, attempt: int, first_token: int) -> bool:
        """All KV of the attempt is in its page, and `first_token` follows it."""
        if not self._live(attempt):
            return False
        self.on(TicketEvent.COMPLETE)
        self.held, self.first_token = self.end, first_token
        return True

    def rearm(self, attempt: int, end: int) -> None:
        """Begin a newer attempt, which brings the KV of `end` tokens; the older one must have failed.

        Raises IntegrityError for an attempt that is not newer, or whose input is shorter.
        """
        if attempt <= self.attempt or end < self.end:
            raise IntegrityError(
                f"attempt {attempt} with {end} tokens cannot follow attempt {self.attempt} with {self.end}"
            )
        self.on(TicketEvent.GRANT)
        self.attempt, self.end = attempt, end

    def finish(self, reason: EndReason) -> None:
        """The ticket is over; its pages are not free yet."""
        self.on(_ENDINGS.get(reason, TicketEvent.FAIL))

    def _live(self, attempt: int) -> bool:
        return self.state is TicketState.RECEIVING and attempt == self.attempt


_OVER = frozenset({_S.DONE, _S.PREEMPTED, _S.CANCELLED, _S.FAILED, _S.FREED})
