"""A ticket moves as its table says, and is ready only when everything has landed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.core.errors import IntegrityError
from pdserve.core.ticket import MOVES, Landing, Ticket, TicketState

ENDS = {TicketState.DONE, TicketState.PREEMPTED, TicketState.CANCELLED, TicketState.FAILED}


def test_every_state_can_end_and_every_end_is_freed() -> None:
    """Whatever happens, pages come back: from each state there is a way to FREED, and none out of it."""
    assert set(MOVES) == set(TicketState)
    assert not MOVES[TicketState.FREED]
    for state in TicketState:
        reached, new = {state}, {state}
        while new := {after for before in new for after in MOVES[before]} - reached:
            reached |= new
        assert TicketState.FREED in reached
    for end in ENDS:
        assert MOVES[end] == {TicketState.FREED}
    for state in set(TicketState) - ENDS - {TicketState.FREED}:
        assert {TicketState.CANCELLED, TicketState.FAILED} <= MOVES[state]


@pytest.mark.parametrize("state", TicketState)
@pytest.mark.parametrize("target", TicketState)
def test_a_move_outside_the_table_raises(state: TicketState, target: TicketState) -> None:
    """The table is the whole truth."""
    ticket = Ticket("t", 1, Landing(1, 0, 1), state)
    if target in MOVES[state]:
        ticket.move(target)
        assert ticket.state is target
    else:
        with pytest.raises(IntegrityError):
            ticket.move(target)
        assert ticket.state is state


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(0, 9), st.integers(0, 9), st.data())
def test_a_landing_is_complete_exactly_when_all_landed(
    layers: int, first: int, length: int, data: st.DataObject
) -> None:
    """Frames in any order of layers; a frame that leaves a gap, repeats or runs over is refused and changes nothing."""
    landing, end = Landing(layers, first, first + length), first + length
    landed = {(layer, token) for layer in range(layers) for token in range(first)}
    while len(landed) < layers * end:
        assert not landing.complete
        start = data.draw(st.integers(0, layers - 1))
        count = data.draw(st.integers(1, layers - start))
        token = data.draw(st.sampled_from(sorted(set(landing.tokens) - {end})))
        tokens = data.draw(st.integers(1, end - token))
        number = landing.frames + data.draw(st.sampled_from([0, 0, 0, 1]))
        cells = {(layer, at) for layer in range(start, start + count) for at in range(token, token + tokens)}
        before = {(layer, at) for layer in range(start, start + count) for at in range(token)}
        fits = number == landing.frames and not cells & landed and before <= landed
        kept = (landing.frames, list(landing.tokens))
        if fits:
            landing.accept(number, start, count, token, tokens)
            landed |= cells
        else:
            with pytest.raises(IntegrityError):
                landing.accept(number, start, count, token, tokens)
            assert (landing.frames, landing.tokens) == kept
    assert landing.complete


@pytest.mark.parametrize(
    "frame", [(0, -1, 1, 0, 1), (0, 0, 0, 0, 1), (0, 0, 3, 0, 1), (0, 0, 1, 0, 0), (0, 0, 1, 0, 5)]
)
def test_a_frame_outside_the_pages_is_refused(frame: tuple[int, int, int, int, int]) -> None:
    """Two layers of four tokens are all there is."""
    with pytest.raises(IntegrityError):
        Landing(2, 0, 4).accept(*frame)


def test_counts_that_contradict_raise() -> None:
    """A commit of fewer frames than landed, or of all of them with tokens missing, is no readiness."""
    ticket = Ticket("t", 1, Landing(1, 0, 4))
    ticket.landing.accept(0, 0, 1, 0, 2)
    assert not ticket.ready
    ticket.commit(1, 7)
    with pytest.raises(IntegrityError, match="not all tokens"):
        assert ticket.ready
    ticket.commit(0, 7)
    with pytest.raises(IntegrityError, match="1 frames landed"):
        assert ticket.ready
    ticket.commit(2, 7)
    assert not ticket.ready
    ticket.landing.accept(1, 0, 1, 2, 2)
    assert ticket.ready and ticket.first_token == 7


class TicketMachine(RuleBasedStateMachine):
    """Random faults against a plain model: a set of landed cells, and whether the commit came."""

    def __init__(self) -> None:
        super().__init__()
        self.ticket = Ticket("t", 1, Landing(2, 1, 4))
        self.cells: set[tuple[int, int]] = set()
        self.frames = 0
        self.total: int | None = None

    @property
    def open(self) -> bool:
        return self.ticket.state in (TicketState.RESERVED, TicketState.RECEIVING)

    @precondition(lambda self: self.open and self.total is None)
    @rule(layer=st.integers(0, 1))
    def land(self, layer: int) -> None:
        token = self.ticket.landing.tokens[layer]
        if token == 4:
            return
        if self.ticket.state is TicketState.RESERVED:
            self.ticket.move(TicketState.RECEIVING)
        self.ticket.landing.accept(self.frames, layer, 1, token, 1)
        self.cells.add((layer, token))
        self.frames += 1

    @precondition(lambda self: self.open and len(self.cells) == 6)
    @rule()
    def commit(self) -> None:
        self.total = self.frames
        self.ticket.commit(self.frames, 5)

    @precondition(lambda self: self.open and self.ticket.ready)
    @rule()
    def take(self) -> None:
        self.ticket.move(TicketState.READY)

    @precondition(lambda self: self.ticket.state is TicketState.RECEIVING)
    @rule()
    def rearm(self) -> None:
        self.ticket.move(TicketState.RESERVED)
        self.ticket.attempt += 1
        self.ticket.landing = Landing(2, 1, 4)
        self.ticket.frame_count = self.ticket.first_token = self.total = None
        self.cells, self.frames = set(), 0

    @rule(to=st.sampled_from(TicketState))
    def drive(self, to: TicketState) -> None:
        """Any move; those of the transfer itself are made above."""
        allowed = to in MOVES[self.ticket.state]
        if allowed and to in (TicketState.RECEIVING, TicketState.READY, TicketState.RESERVED):
            return
        before = self.ticket.state
        try:
            self.ticket.move(to)
            assert allowed
        except IntegrityError:
            assert not allowed and self.ticket.state is before

    @invariant()
    def readiness_is_everything(self) -> None:
        assert self.ticket.ready == (self.total is not None and len(self.cells) == 6)
        decoding = self.ticket.state in (TicketState.READY, TicketState.DECODING, TicketState.HANDING_OFF)
        assert not decoding or self.ticket.ready, "nobody decodes from KV that is not there"


TestTicket = TicketMachine.TestCase
