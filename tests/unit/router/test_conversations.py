"""What the router remembers of conversations: the latest, in bounded memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pdserve.router.conversations import Conversations


def assigned(*workers: str | None) -> Any:
    prefill, decode = (worker and SimpleNamespace(worker_id=worker) for worker in workers)
    return SimpleNamespace(prefill=prefill, decode=decode)


def test_where_a_conversation_was_last_is_remembered() -> None:
    known = Conversations()
    assert known.near("one") == known.near("") == frozenset()
    known.note("one", assigned("p0", "d0"))
    known.note("two", assigned(None, "d1"))
    known.note("", assigned("p1", "d1"))
    assert known.near("one") == {"p0", "d0"} and known.near("two") == {"d1"} and known.near("") == frozenset()
    known.note("one", assigned("p1", "d0"))
    assert known.near("one") == {"p1", "d0"}


def test_the_latest_are_remembered_and_no_more_than_so_many() -> None:
    known = Conversations(size=10)
    for number in range(1000):
        known.note(str(number), assigned("p0", f"d{number % 3}"))
        if number % 3 == 0:
            known.note("busy", assigned("p9", "d9"))
        assert known.near("busy") == {"p9", "d9"}
        held = [other for other in range(number + 1) if known.near(str(other))]
        assert held == list(range(held[0], number + 1)) and len(held) <= 10
    assert len(held) >= 3
