"""Who goes first, and what the accounts say."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.ledger import Ledger, Work
from pdserve.router.waiting import Refusals, Waiting


def waiting(arrival: int, priority: int = 0, replay: bool = False) -> Waiting:
    return Waiting(cast(Any, None), 1, 1, priority, replay, 0.0, arrival, {}, Refusals())


def test_priority_then_replays_then_arrival() -> None:
    queue = [waiting(0), waiting(1, replay=True), waiting(2, priority=1), waiting(3, priority=1, replay=True)]
    assert [item.arrival for item in sorted(queue, key=lambda item: item.rank)] == [3, 2, 1, 0]
    assert [item.arrival for item in sorted([waiting(5), waiting(4)], key=lambda item: item.rank)] == [4, 5]


def sums(ledger: Ledger) -> tuple[int, ...]:
    flying = ledger.in_flight_tokens, ledger.in_flight_squares, ledger.in_flight_blocks
    return ledger.outstanding_tokens, ledger.sequences, *flying


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["add", "prefilled", "settled", "close", "reported"]))))
def test_accounts_are_never_negative_and_end_at_zero(moves: list[tuple[int, str]]) -> None:
    ledger = Ledger()
    entries: list[Any] = [None] * 5
    for index, move in moves:
        if move == "add":
            if entries[index] is not None:
                entries[index].close()
            entries[index] = ledger.add(Work(10, 10, 100, 3))
        elif move == "reported":
            ledger.reported()
        elif entries[index] is not None:
            getattr(entries[index], move)()
        assert all(value >= 0 for value in sums(ledger))
    for entry in entries:
        if entry is not None:
            entry.close()
    ledger.reported()
    assert sums(ledger) == (0,) * 5
