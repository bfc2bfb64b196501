"""Classes before tenants, tenants by what they got, and nobody ahead by more than one request."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.policy.fairness import FairQueue

LOW, HIGH = (True, 0), (True, -1)  # classes, as the router makes them: whoever holds a reservation, then priority


def queue_of(*waiting: tuple[str, str, int], remembered: int = 4096) -> FairQueue[str]:
    """Items as (name, tenant, cost) in the order of their arrival."""
    queue: FairQueue[str] = FairQueue(remembered)
    for arrival, (name, tenant, cost) in enumerate(waiting):
        queue.add(name, tenant, (LOW, arrival), cost)
    return queue


def test_who_got_less_goes_first() -> None:
    queue = queue_of(("a1", "a", 100), ("a2", "a", 100), ("a3", "a", 100), ("b1", "b", 30), ("b2", "b", 30))
    # a is at 100 after its first; b needs more than three of its own to get there, and has two.
    assert list(queue) == ["a1", "b1", "b2", "a2", "a3"]
    queue.serve("a1")
    queue.serve("b1")
    assert list(queue) == ["b2", "a2", "a3"]
    assert (queue.charged("a", (LOW,)), queue.charged("b", (LOW,))) == (100, 30)


def test_a_flood_waits_behind_itself() -> None:
    queue = queue_of(*((f"a{index}", "a", 10) for index in range(100)), ("b", "b", 10))
    assert list(itertools.islice(queue, 3)) == ["a0", "b", "a1"]


def test_a_better_class_goes_first_whatever_its_tenant_got() -> None:
    queue = queue_of(("low", "b", 1))
    queue.add("high1", "a", (HIGH, 1), 1000)
    queue.add("high2", "a", (HIGH, 2), 1000)
    queue.add("held", "a", ((False, 5), 3), 1000)
    assert list(queue) == ["held", "high1", "high2", "low"]


def test_a_tenant_s_own_order_is_its_rank() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.add("late", "a", (LOW, True, 9.0, 1), 1)
    queue.add("soon", "a", (LOW, True, 5.0, 2), 1)
    queue.add("replay", "a", (LOW, False, 99.0, 3), 1)
    assert list(queue) == ["replay", "soon", "late"]


def test_who_was_idle_has_no_credit() -> None:
    queue = queue_of(("b0", "b", 0), *((f"a{index}", "a", 100) for index in range(4)))
    for name in ("b0", "a0", "a1"):
        queue.serve(name)
    for index in range(3):
        queue.add(f"b{index + 1}", "b", (LOW, 10 + index), 100)
    assert queue.charged("b", (LOW,)) == 200
    assert list(queue) == ["a2", "b1", "a3", "b2", "b3"]


def test_who_comes_to_an_empty_queue_starts_at_the_last_one_s_counter() -> None:
    queue = queue_of(("a0", "a", 100))
    queue.serve("a0")
    queue.add("b0", "b", (LOW, 1), 100)
    queue.add("a1", "a", (LOW, 2), 100)
    assert (queue.charged("a", (LOW,)), queue.charged("b", (LOW,))) == (100, 100)
    assert list(queue) == ["b0", "a1"]


def test_answers_are_charged_later() -> None:
    queue = queue_of(("a0", "a", 10), ("b0", "b", 10), ("a1", "a", 10), ("b1", "b", 10))
    queue.serve("a0")
    queue.charge("a", (LOW,), 50)
    queue.serve("b0")
    assert list(queue) == ["b1", "a1"]
    queue.serve("a1")
    queue.charge("a", (LOW,), 7)  # it has nothing waiting now, and is remembered
    queue.charge("nobody", (LOW,), 7)
    queue.charge("a", (HIGH,), 7)
    assert (queue.charged("a", (LOW,)), queue.charged("a", (HIGH,))) == (77, 0)


def test_an_answer_is_charged_before_there_is_one_and_settled_at_its_end() -> None:
    """Prompts of 10 tokens with answers of 1,000 against prompts of 1,000 with answers of 10: at any time the two
    tenants are within one request of each other, also while no answer has ended."""
    costs = {"a": 10 + 2 * 1000, "b": 1000 + 2 * 10}
    queue = queue_of(*((f"{tenant}{index}", tenant, costs[tenant]) for index in range(20) for tenant in "ab"))
    for _ in range(12):
        queue.serve(next(iter(queue)))
        assert abs(queue.charged("a", (LOW,)) - queue.charged("b", (LOW,))) <= max(costs.values())
    assert [len([item for item in queue if item.startswith(tenant)]) for tenant in "ab"] == [16, 12]
    queue.charge("a", (LOW,), -2000)  # one of its answers was empty
    assert queue.charged("a", (LOW,)) == 4 * 2010 - 2000
    assert next(iter(queue)).startswith("a")


def test_what_is_given_back_is_no_credit() -> None:
    """Charges from before a tenant came back, to a queue whose smallest counter was above its own."""
    queue = queue_of(("a0", "a", 500), *((f"b{index}", "b", 300) for index in range(4)))
    for name in ("a0", "b0", "b1"):
        queue.serve(name)
    queue.add("a1", "a", (LOW, 9), 500)
    assert queue.charged("a", (LOW,)) == 600  # as much as "b" has got, who waits
    queue.charge("a", (LOW,), -400)
    assert queue.charged("a", (LOW,)) == 600
    queue.serve("a1")
    queue.charge("a", (LOW,), -400)
    assert queue.charged("a", (LOW,)) == 700


def test_a_starved_class_gives_nobody_credit_in_another() -> None:
    queue = queue_of(("low", "c", 1))
    for index in range(4):
        queue.add(f"a{index}", "a", (HIGH, index), 100)
    queue.serve("a0")
    queue.serve("a1")
    queue.add("c0", "c", (HIGH, 9), 100)
    queue.add("c1", "c", (HIGH, 10), 100)
    assert list(queue) == ["a2", "c0", "a3", "c1", "low"]


def test_what_is_remembered_is_bounded() -> None:
    queue: FairQueue[int] = FairQueue(remembered=2)
    for index in range(5):
        queue.add(index, f"tenant{index}", ((True, -index), index), 10)
        queue.serve(index)
    assert [queue.charged(f"tenant{index}", ((True, -index),)) for index in range(5)] == [0, 0, 0, 10, 10]
    assert not list(queue)


def test_what_waits_is_never_forgotten() -> None:
    queue = queue_of(("a0", "a", 5), ("a1", "a", 5), remembered=0)
    queue.serve("a0")
    assert queue.charged("a", (LOW,)) == 5
    queue.serve("a1")
    assert queue.charged("a", (LOW,)) == 0


def test_mistakes_are_told() -> None:
    queue = queue_of(("a0", "a", 5))
    for name, cost in (("a0", 5), ("new", -1)):
        with pytest.raises(ValueError, match="waits already, or its cost"):
            queue.add(name, "b", (LOW, 1), cost)
    for take in (queue.remove, queue.serve):
        with pytest.raises(KeyError):
            take("new")
    assert "a0" in queue and "new" not in queue and len(queue) == 1


def test_the_first_of_many_are_found_without_looking_at_all() -> None:
    """Counted, not timed: ranks that are compared, among 10,000 of 1,000 tenants."""
    compared = 0

    @dataclass(frozen=True)
    class Counted:
        value: int

        def __lt__(self, other: Counted) -> bool:
            nonlocal compared
            compared += 1
            return self.value < other.value

    queue: FairQueue[int] = FairQueue()
    for index in range(10_000):
        queue.add(index, f"tenant{index % 1000}", (LOW, Counted(index)), 1)
    compared = 0
    assert list(itertools.islice(queue, 16)) == list(range(16))
    assert compared < 16 * 20
    compared = 0
    queue.serve(0)
    queue.add(10_000, "tenant7", (LOW, Counted(10_000)), 1)
    assert compared < 100


costs = st.integers(1, 50)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), costs), max_size=40),
    st.lists(costs, min_size=1, max_size=10),
)
def test_two_that_always_have_work_differ_by_at_most_one_request(
    others: list[tuple[str, int]], sizes: list[int]
) -> None:
    """x has a request for each size over and over, y one that costs the largest; others come and go beside them."""
    queue: FairQueue[int] = FairQueue()
    numbers, largest, tenants = itertools.count(), max([*sizes, *(cost for _, cost in others)]), dict[int, str]()
    charged = {"x": 0, "y": 0}

    def add(tenant: str, cost: int) -> None:
        number = next(numbers)
        tenants[number] = tenant
        queue.add(number, tenant, (LOW, number), cost)

    def serve() -> None:
        number = next(iter(queue))
        tenant, before = tenants[number], queue.charged(tenants[number], (LOW,))
        queue.serve(number)
        if tenant in charged:
            cost = queue.charged(tenant, (LOW,)) - before
            charged[tenant] += cost
            add(tenant, sizes[next(numbers) % len(sizes)] if tenant == "x" else largest)
            assert abs(charged["x"] - charged["y"]) <= largest

    # Two each, so that none is ever without.
    for tenant in ("x", "y", "x", "y"):
        add(tenant, largest)
    for tenant, cost in others:
        add(tenant, cost)
        serve()
        serve()
    for _ in range(30):
        serve()


@dataclass
class Plain:
    """A queue that is as slow as it is plain: looks at everything each time."""

    waiting: list[tuple[int, str, tuple[Any, ...], int]] = field(default_factory=list)
    counters: dict[tuple[Any, str], int] = field(default_factory=dict)
    last: dict[Any, int] = field(default_factory=dict)

    def active(self, name: Any) -> set[str]:
        return {tenant for _, tenant, rank, _ in self.waiting if rank[0] == name}

    def add(self, item: int, tenant: str, rank: tuple[Any, ...], cost: int) -> None:
        name, active = rank[0], self.active(rank[0])
        if tenant not in active:
            least = min((self.counters[name, other] for other in active), default=self.last.get(name, 0))
            self.counters[name, tenant] = max(self.counters.get((name, tenant), 0), least)
        self.waiting.append((item, tenant, rank, cost))

    def take(self, item: int, served: bool) -> None:
        found = next(entry for entry in self.waiting if entry[0] == item)
        _, tenant, rank, cost = found
        self.waiting.remove(found)
        self.counters[rank[0], tenant] += cost * served
        if tenant not in self.active(rank[0]):
            self.last[rank[0]] = self.counters[rank[0], tenant]

    def order(self) -> list[int]:
        counters, left, found = dict(self.counters), list(self.waiting), []
        while left:
            name = min(rank[0] for _, _, rank, _ in left)
            heads: dict[str, tuple[int, str, tuple[Any, ...], int]] = {}
            for entry in sorted((entry for entry in left if entry[2][0] == name), key=lambda entry: entry[2]):
                heads.setdefault(entry[1], entry)
            best = min(heads.values(), key=lambda entry: (counters[name, entry[1]], entry[2]))
            counters[name, best[1]] += best[3]
            left.remove(best)
            found.append(best[0])
        return found


class AgainstThePlainOne(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue()
        self.plain = Plain()
        self.arrivals = itertools.count()

    @rule(
        tenant=st.sampled_from("abcd"),
        holds=st.booleans(),
        priority=st.integers(0, 1),
        deadline=st.integers(0, 3),
        cost=st.integers(0, 20),
    )
    def add(self, tenant: str, holds: bool, priority: int, deadline: int, cost: int) -> None:
        number = next(self.arrivals)
        rank = ((not holds, -priority), deadline, number)
        self.queue.add(number, tenant, rank, cost)
        self.plain.add(number, tenant, rank, cost)

    @precondition(lambda self: len(self.queue) > 0)
    @rule(data=st.data(), first=st.booleans(), served=st.booleans())
    def take(self, data: st.DataObject, first: bool, served: bool) -> None:
        order = list(self.queue)
        item = order[0] if first else data.draw(st.sampled_from(order))
        (self.queue.serve if served else self.queue.remove)(item)
        self.plain.take(item, served)

    @rule(tenant=st.sampled_from("abcd"), holds=st.booleans(), priority=st.integers(0, 1), cost=st.integers(0, 20))
    def charge(self, tenant: str, holds: bool, priority: int, cost: int) -> None:
        name = (not holds, -priority)
        self.queue.charge(tenant, (name,), cost)
        if (name, tenant) in self.plain.counters:
            self.plain.counters[name, tenant] += cost

    @invariant()
    def same(self) -> None:
        order = list(self.queue)
        assert order == self.plain.order()
        assert len(self.queue) == len(order)
        waiting = {item: (tenant, rank) for item, tenant, rank, _ in self.plain.waiting}
        classes = [waiting[item][1][0] for item in order]
        assert classes == sorted(classes)
        for tenant in "abcd":
            own = [waiting[item][1] for item in order if waiting[item][0] == tenant]
            assert own == sorted(own)


AgainstThePlainOne.TestCase.settings = settings(max_examples=50, stateful_step_count=30)
TestAgainstThePlainOne = AgainstThePlainOne.TestCase
