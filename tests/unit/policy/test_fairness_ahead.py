"""What goes before a newcomer, and who is looked at: the queue is asked, and nobody leaves it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pdserve.policy.fairness import FairQueue, PromptWork

LOW, HIGH = (True, 0), (True, -1)  # classes, as the router makes them


def queue_of(*waiting: tuple[str, str, int]) -> FairQueue[str]:
    """Items as (name, tenant, cost) in the order of their arrival."""
    queue: FairQueue[str] = FairQueue()
    for arrival, (name, tenant, cost) in enumerate(waiting):
        queue.add(name, tenant, (LOW, arrival), cost, PromptWork(cost, cost**2))
    return queue


def test_what_is_ahead_of_a_newcomer() -> None:
    queue = queue_of(*((f"a{index}", "a", 10) for index in range(100)), ("b0", "b", 10), ("b1", "b", 10))
    queue.add("high", "c", (HIGH, 0), 7, PromptWork(7, 49))
    for tenant, rank, cost, squares, count in (
        ("c", (LOW, 200), 10 + 10 + 7, 249, 3),  # one of each, and the better class
        ("b", (LOW, 200), 20 + 30 + 7, 549, 6),
        ("a", (LOW, 200), 1000 + 20 + 7, 10_249, 103),
        ("a", (HIGH, 1), 7, 49, 1),
        ("a", ((False, 0), 1), 0, 0, 0),
        ("a", ((True, 5), 1), 1027, 10_249, 103),
    ):
        assert queue.ahead(tenant, rank) == ((cost, squares), count)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.booleans()), max_size=30),
    st.sampled_from("abcd"),
    st.booleans(),
    st.integers(1, 9),
)
def test_what_is_ahead_is_what_is_served_before(
    moves: list[tuple[str, bool, bool]], tenant: str, high: bool, cost: int
) -> None:
    """Exactly so where all cost the same."""
    queue: FairQueue[int] = FairQueue()
    for number, (other, first, serves) in enumerate(moves):
        queue.add(number, other, (HIGH if first else LOW, number), cost, PromptWork(cost, cost))
        if serves:
            queue.serve(next(iter(queue)))
    rank = (HIGH if high else LOW, len(moves))
    told = queue.ahead(tenant, rank)
    queue.add(-1, tenant, rank, cost)
    place = list(queue).index(-1)
    assert told == ((place * cost, place * cost), place)


def test_work_is_not_what_is_charged() -> None:
    """What is cached is charged, and nobody computes it; a replay is computed, and nobody is charged for it."""
    queue: FairQueue[str] = FairQueue()
    for name, tenant, rank, cost, tokens in (
        ("replay", "a", (LOW, False, 1), 0, 700),
        ("cached", "a", (LOW, True, 2), 1000, 16),
        ("other", "b", (LOW, True, 3), 1000, 30),
        ("high", "b", (HIGH, True, 4), 1000, 5),
    ):
        queue.add(name, tenant, rank, cost, PromptWork(tokens, 2 * tokens))

    def ahead(tenant: str, *rank: Any) -> tuple[int, int]:
        work, count = queue.ahead(tenant, rank)
        assert work.squares == 2 * work.tokens
        return work.tokens, count

    assert ahead("a", LOW, True, 9) == (5 + 700 + 16 + 30, 4)
    assert ahead("a", LOW, True, 1.5) == (5 + 700 + 30, 3)
    assert ahead("b", LOW, True, 9) == (5 + 30 + 716, 4)
    assert ahead("c", HIGH, True, 9) == (5, 1)
    queue.serve("cached")
    queue.remove("high")
    assert ahead("a", LOW, True, 9) == (700 + 30, 2)


def test_a_look_at_the_first_reaches_others_behind_those_that_are_passed_over() -> None:
    queue = queue_of(*((f"a{index}", "a", 1) for index in range(100)), *((f"b{index}", "b", 200) for index in range(3)))
    found = list(queue.first(4))
    assert found[:2] == ["a0", "b0"] and found.count("b1") == 1
    assert sum(name.startswith("a") for name in found) == 8, "twice as many as the first ones, of one tenant"
    queue = queue_of(*((f"t{index}", f"t{index}", 1) for index in range(100)))
    assert len(list(queue.first(4))) == 32


def test_a_look_at_the_first_stands_that_they_leave() -> None:
    queue = queue_of(*((f"a{index}", "a", 1) for index in range(20)))
    found = []
    for name in queue.first(4):
        found.append(name)
        queue.serve(name)
    assert found == ["a0", "a1", "a2", "a3"]
