"""Who goes first, and what the accounts say."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from pdserve.policy.fairness import NO_WORK
from pdserve.router.conversations import Pace
from pdserve.router.follow import Failure
from pdserve.router.ledger import Ledger, Work
from pdserve.router.request import RequestRun
from pdserve.router.waiting import ModelQueue, Refusals, Waiting


def waiting(arrival: int, priority: int = 0, replay: bool = False) -> Waiting:
    return Waiting(cast(Any, None), 1, 1, priority, replay, 0.0, arrival, {}, Refusals())


def test_priority_then_replays_then_arrival() -> None:
    queue = [waiting(0), waiting(1, replay=True), waiting(2, priority=1), waiting(3, priority=1, replay=True)]
    assert [item.arrival for item in sorted(queue, key=lambda item: item.rank)] == [3, 2, 1, 0]
    assert [item.arrival for item in sorted([waiting(5), waiting(4)], key=lambda item: item.rank)] == [4, 5]


def test_an_answer_is_charged_with_the_first_try() -> None:
    """As long as was expected of it, and no longer than it may be; nothing for a replay, or another prefill worker."""
    first, replay, rearm = (
        Waiting(cast(Any, None), 10, 500, 0, replay, 0.0, 0, {}, Refusals()) for replay in (0, 1, 0)
    )
    first.expected = replay.expected = rearm.expected = 300
    rearm.decode = "d0"
    assert [(item.charge, item.answer_charge) for item in (first, replay, rearm)] == [(610, 600), (0, 0), (0, 0)]
    first.expected = 2000
    assert first.charge == 10 + 2 * 500


def test_an_idle_hour_is_no_pace() -> None:
    """Two requests come together after one; and one leaves before it was placed."""
    pace = Pace()
    pace.placed(0.0, others_wait=False)
    pace.placed(3600.0, others_wait=True)
    pace.placed(3600.5, others_wait=False)
    assert pace.retry_after(0) == 0.5
    pace.placed(7200.0, others_wait=True)
    pace.idle()
    pace.placed(9999.0, others_wait=True)
    assert pace.retry_after(0) == 0.5


def test_a_queue_that_is_left_empty_has_no_pace() -> None:
    queue = ModelQueue()
    one, other = waiting(0), waiting(1)
    for item in (one, other):
        queue.add(item, NO_WORK)
    queue.leave(one, served=True, now=1.0)
    queue.leave(other, served=False, now=2.0)
    queue.pace.placed(1e9, others_wait=False)
    assert queue.pace.retry_after(0) == 1.0, "nothing is known of it"


class Patient:
    """Hears for how long somebody would wait."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def wait_membership(self, timeout: float) -> None:
        self.seconds.append(timeout)


async def test_going_on_after_failures_waits_for_two_seconds_at_most() -> None:
    run, fleet = object.__new__(RequestRun), Patient()
    run._fleet = cast(Any, fleet)
    for run._fruitless in (0, 1, 2, 3, 4, 8, 2000):
        await run._back_off(Failure("it died"))
    assert fleet.seconds == [0.1, 0.2, 0.4, 2.0, 2.0]


def sums(ledger: Ledger) -> tuple[int, ...]:
    flying = ledger.in_flight_tokens, ledger.in_flight_squares, ledger.in_flight_blocks
    return ledger.outstanding_tokens, ledger.sequences, ledger.bounded, *flying


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["add", "prefilled", "settled", "close", "reported"]))))
def test_accounts_are_never_negative_and_end_at_zero(moves: list[tuple[int, str]]) -> None:
    ledger = Ledger()
    entries: list[Any] = [None] * 5
    for index, move in moves:
        if move == "add":
            if entries[index] is not None:
                entries[index].close()
            entries[index] = ledger.add(Work(10, 10, 100, 3, bounded=index > 2))
        elif move == "reported":
            ledger.reported()
        elif entries[index] is not None:
            getattr(entries[index], move)()
        assert all(value >= 0 for value in sums(ledger))
    for entry in entries:
        if entry is not None:
            entry.close()
    ledger.reported()
    assert sums(ledger) == (0,) * 6
