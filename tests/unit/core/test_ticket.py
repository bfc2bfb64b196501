"""A ticket moves as its table says, its older attempts are fenced, and it is ready only when everything has landed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.errors import IntegrityError
from pdserve.core.sequence import EndReason
from pdserve.core.ticket import MOVES, Landing, Ticket, TicketEvent, TicketState

ENDS = {TicketState.DONE, TicketState.PREEMPTED, TicketState.CANCELLED, TicketState.FAILED}


def test_every_state_can_end_and_every_end_is_freed() -> None:
    """Whatever happens, pages come back: from each state there is a way to FREED, and none out of it."""
    assert set(MOVES) == set(TicketState)
    assert not MOVES[TicketState.FREED]
    for state in TicketState:
        reached, new = {state}, {state}
        while new := {after for before in new for after in MOVES[before].values()} - reached:
            reached |= new
        assert TicketState.FREED in reached
    for end in ENDS:
        assert MOVES[end] == {TicketEvent.FREE: TicketState.FREED}
    for state in set(TicketState) - ENDS - {TicketState.FREED}:
        assert {TicketState.CANCELLED, TicketState.FAILED} <= set(MOVES[state].values())


@pytest.mark.parametrize("state", TicketState)
@pytest.mark.parametrize("event", TicketEvent)
def test_an_event_outside_the_table_raises(state: TicketState, event: TicketEvent) -> None:
    """The table is the whole truth."""
    ticket = Ticket("t", 1, 4, state=state)
    if event in MOVES[state]:
        ticket.on(event)
        assert ticket.state is MOVES[state][event]
    else:
        with pytest.raises(IntegrityError, match=f"{state}, where nothing can {event}"):
            ticket.on(event)
        assert ticket.state is state


def test_a_reservation_outlives_its_attempts_and_fences_them() -> None:
    """What an older attempt says changes nothing; what it landed is kept."""
    ticket = Ticket("t", 1, 10, held=2)
    assert not ticket.complete(1, 7), "no attempt was granted"
    ticket.on(TicketEvent.GRANT)
    assert ticket.attempt_failed(1, 6) and not ticket.attempt_failed(1, 8)
    assert (ticket.state, ticket.held) == (TicketState.RESERVED, 6)
    ticket.rearm(2, 11)
    assert not ticket.complete(1, 7) and not ticket.attempt_failed(1, 11)
    assert (ticket.state, ticket.attempt, ticket.held) == (TicketState.RECEIVING, 2, 6)
    assert ticket.attempt_failed(2, 0) and ticket.held == 6
    ticket.rearm(5, 11)
    assert ticket.complete(5, 9) and ticket.first_token == 9 and ticket.held == 11
    assert not ticket.attempt_failed(5, 0) and not ticket.waits_for_kv


@pytest.mark.parametrize(("attempt", "end"), [(1, 10), (0, 10), (2, 9)])
def test_an_attempt_that_is_not_newer_or_is_shorter_is_refused(attempt: int, end: int) -> None:
    ticket = Ticket("t", 1, 10)
    with pytest.raises(IntegrityError, match="cannot follow"):
        ticket.rearm(attempt, end)
    assert (ticket.state, ticket.attempt, ticket.end) == (TicketState.RESERVED, 1, 10)


@pytest.mark.parametrize("state", [s for s in TicketState if s is not TicketState.RESERVED])
def test_only_a_reservation_without_a_live_attempt_is_rearmed(state: TicketState) -> None:
    with pytest.raises(IntegrityError):
        Ticket("t", 1, 10, state=state).rearm(2, 10)


@pytest.mark.parametrize("reason", EndReason)
def test_every_reason_ends_a_ticket(reason: EndReason) -> None:
    state = TicketState.RESERVED if reason is EndReason.NO_CAPACITY else TicketState.DECODING
    ticket = Ticket("t", 1, 10, state=state)
    ticket.finish(reason)
    assert ticket.over and ticket.state is not TicketState.FREED
    assert (ticket.state is TicketState.DONE) == (reason.answer_complete or reason is EndReason.HANDED_OFF)
    ticket.on(TicketEvent.FREE)


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
            landing.check(number, start, count, token, tokens)
            assert (landing.frames, landing.tokens) == kept, "its bytes are not there yet"
            landing.accept(number, start, count, token, tokens)
            landed |= cells
        else:
            for judge in (landing.check, landing.accept):
                with pytest.raises(IntegrityError):
                    judge(number, start, count, token, tokens)
                assert (landing.frames, landing.tokens) == kept
        whole = next((t for t in range(end) if not {(layer, t) for layer in range(layers)} <= landed), end)
        assert landing.whole == whole
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
    landing = Landing(1, 0, 4)
    landing.accept(0, 0, 1, 0, 2)
    assert not landing.ready
    landing.commit(1)
    with pytest.raises(IntegrityError, match="not all tokens"):
        assert landing.ready
    landing.commit(0)
    with pytest.raises(IntegrityError, match="1 frames landed"):
        assert landing.ready
    landing.commit(2)
    assert not landing.ready
    landing.accept(1, 0, 1, 2, 2)
    assert landing.ready
