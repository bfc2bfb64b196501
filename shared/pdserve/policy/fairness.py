"""Who goes next: classes first, then tenants by the tokens they got, then a tenant's own order.

Within a class this is the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI
2024): each tenant has a counter of the tokens it was served, the smallest goes first, and a dispatch is charged at
once, with the answer that is expected; at its end the difference is settled. It is what deficit round robin becomes
where service is charged when it is handed out: there is no quantum to choose (one below a long prompt makes rounds that
serve nobody, one above it makes bursts), and no deficit to save up. A tenant that was idle gets no credit for it: when
it comes back its counter is lifted to the smallest of those that wait.

So of two tenants that always have work in a class, neither is ever ahead by more than the largest single charge, and
by what the answers that it has running turn out longer than was expected of them. A tenant that floods waits behind its
own requests, not in front of others'.

Each class counts for itself. With one counter for all, whoever was starved in a low class would hold the smallest, and
a newcomer to a high class, lifted to that, could shut out its peers there for as long.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)
# Sortable. The first element is the class, and hashable: everything of a smaller one goes first.
Rank = tuple[Any, ...]

REMEMBERED = 4096  # tenants that have nothing waiting, over all classes; one that was forgotten is a new one
OUTPUT_WEIGHT = 2  # what an answer's token costs, in prompt tokens: the paper's, and about what providers ask for it


def answer_cost(expected: int, remaining: int) -> int:
    """What to charge for an answer that is to come: so many tokens are expected of it, and it may have so many."""
    return OUTPUT_WEIGHT * min(expected, remaining)


class PromptWork(NamedTuple):
    """What somebody has to compute: tokens, and their squares as in `policy.estimate`."""

    tokens: int
    squares: int

    def plus(self, other: PromptWork) -> PromptWork:
        return PromptWork(self.tokens + other.tokens, self.squares + other.squares)

    def minus(self, other: PromptWork) -> PromptWork:
        return PromptWork(self.tokens - other.tokens, self.squares - other.squares)


NO_WORK = PromptWork(0, 0)


@dataclass(slots=True)
class _Place(Generic[T]):
    """Where an item waits. `(rank, number)` is unique and sorts a line."""

    item: T
    line: _Line[T]
    rank: Rank
    number: int
    cost: int
    work: PromptWork

    @property
    def key(self) -> tuple[Rank, int]:
        return self.rank, self.number


@dataclass(slots=True)
class _Line(Generic[T]):
    """What one tenant has waiting in one class, first out first, and the tokens that it was charged there. `floor` is
    what its counter was lifted to when it last came back: no charge that is given back makes it smaller."""

    tenant: str
    group: _Class[T]
    counter: int = 0
    floor: int = 0
    cost: int = 0  # of all its places,
    work: PromptWork = NO_WORK
    places: list[_Place[T]] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, Rank, int]:
        """Sorts lines; of equal counters the line with the better head goes first."""
        return self.counter, *self.places[0].key


@dataclass(slots=True)
class _Class(Generic[T]):
    """The tenants of one class. `lines` are those with something waiting, the next to be served first."""

    name: Any
    lines: list[_Line[T]] = field(default_factory=list)
    known: dict[str, _Line[T]] = field(default_factory=dict)  # by tenant, the idle ones too
    work: PromptWork = NO_WORK  # of all that waits in it,
    count: int = 0  # which is so many
    last: int = 0  # the counter of the tenant that was last to have nothing waiting any more

    def enter(self, line: _Line[T]) -> None:
        insort(self.lines, line, key=lambda other: other.key)

    def leave(self, line: _Line[T]) -> None:
        """Before anything of its key changes."""
        del self.lines[bisect_left(self.lines, line.key, key=lambda other: other.key)]

    def in_turn(self, most: int) -> Iterator[T]:
        """As they would be served, at most so many of a tenant: what was not reached yet, merged with who was served
        already in thought."""
        untouched, served = iter(self.lines), list[tuple[int, Rank, int, int, _Line[T]]]()
        line = next(untouched, None)
        while line is not None or served:
            if line is not None and (not served or line.key < served[0][:3]):
                counter, index, current = line.counter, 0, line
                line = next(untouched, None)
            else:
                counter, _, _, index, current = heapq.heappop(served)
            place = current.places[index]
            yield place.item
            index += 1
            if index < min(len(current.places), most):
                heapq.heappush(served, (counter + place.cost, *current.places[index].key, index, current))


class FairQueue(Generic[T]):
    """An ordered waiting queue. A call costs about the logarithm of what waits, and so does a step of an iteration.

    Items are told apart by their hash, and each waits once. Nothing may change during an iteration.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._numbers = itertools.count()
        self._places: dict[T, _Place[T]] = {}
        self._classes: dict[Any, _Class[T]] = {}
        self._order: list[Any] = []  # names of the classes in which something waits
        self._idle: dict[tuple[Any, str], None] = {}  # class and tenant, longest idle first

    def add(self, item: T, tenant: str, rank: Rank, cost: int, work: PromptWork = NO_WORK) -> None:
        """Let `item` wait; `cost` are the tokens that serving it is charged with, `work` is what has to be computed for
        it. Raises ValueError where it waits already or costs less than nothing."""
        if item in self._places or cost < 0:
            raise ValueError(f"it waits already, or its cost is below 0: {item!r}, {cost}")
        group = self._classes.setdefault(rank[0], _Class(rank[0]))
        line = group.known.get(tenant)
        if line is None:
            line = group.known[tenant] = _Line(tenant, group)
        if line.places:
            group.leave(line)
        else:
            if not group.lines:
                insort(self._order, group.name)
            line.floor = group.lines[0].counter if group.lines else group.last
            line.counter = max(line.counter, line.floor)
            self._idle.pop((group.name, tenant), None)
        place = self._places[item] = _Place(item, line, rank, next(self._numbers), cost, work)
        insort(line.places, place, key=lambda other: other.key)
        line.cost, line.work = line.cost + cost, line.work.plus(work)
        group.work, group.count = group.work.plus(work), group.count + 1
        group.enter(line)

    def remove(self, item: T) -> None:
        """It waits no longer, and was not served. Raises KeyError where it does not wait."""
        self._take(item, served=False)

    def serve(self, item: T) -> None:
        """It waits no longer: its tenant got what it costs. Any item may be served, not only the first. Raises KeyError
        where it does not wait."""
        self._take(item, served=True)

    def charge(self, tenant: str, rank: Rank, cost: int) -> None:
        """Settle what an item of `rank` that was served cost beyond what it was charged with; below 0: less. What was
        charged before its tenant last came back to a queue lowers the counter to what that would have been, and no
        further. A tenant that was forgotten since is not charged."""
        group = self._classes.get(rank[0])
        line = group.known.get(tenant) if group is not None else None
        if group is None or line is None:
            return
        if line.places:
            group.leave(line)
        line.counter = max(line.counter + cost, line.floor)
        if line.places:
            group.enter(line)

    def charged(self, tenant: str, rank: Rank) -> int:
        """The tenant's counter in the class of `rank`; 0 where it is not known there."""
        group = self._classes.get(rank[0])
        line = group.known.get(tenant) if group is not None else None
        return line.counter if line is not None else 0

    def ahead(self, tenant: str, rank: Rank) -> tuple[PromptWork, int]:
        """Work and number of what would be served before a new item of that tenant and rank, if nothing else came.
        Of other tenants in its class as if what each has waiting were of one size."""
        better = [self._classes[name] for name in self._order[: bisect_left(self._order, rank[0])]]
        work, count = _total(group.work for group in better), sum(group.count for group in better)
        group = self._classes.get(rank[0])
        if group is None or not group.lines:
            return work, count
        own = group.known.get(tenant, _Line(tenant, group))
        before = bisect_right(own.places, rank, key=lambda place: place.rank)
        if before == len(own.places):
            before_cost, before_work = own.cost, own.work
        else:
            before_cost = sum(place.cost for place in own.places[:before])
            before_work = _total(place.work for place in own.places[:before])
        work, count = work.plus(before_work), count + before
        until = before_cost + (own.counter if own.places else max(own.counter, group.lines[0].counter))
        for line in group.lines:
            if line.counter > until:
                break
            if line is not own:
                waiting = len(line.places)
                each = line.cost / waiting
                served = min(waiting, int((until - line.counter) / each) + 1) if each else waiting
                tokens, squares = (figure * served // waiting for figure in line.work)
                count, work = count + served, work.plus(PromptWork(tokens, squares))
        return work, count

    def first(self, count: int) -> Iterator[T]:
        """The first `count`, as they are now: whoever is handed out may leave. Then up to eight times as many, for a
        caller that passes most of them over: as long as nobody has left, and at most twice `count` of one tenant."""
        waiting, order = len(self), self._in_turn(2 * count)
        yield from list(itertools.islice(order, count))
        for _ in range(7 * count):
            item = next(order, None) if len(self) == waiting else None
            if item is None:
                return
            yield item

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: T) -> bool:
        return item in self._places

    def __iter__(self) -> Iterator[T]:
        """In the order in which all would be served, if each were served in turn and nothing came."""
        return self._in_turn(len(self))

    def _in_turn(self, most: int) -> Iterator[T]:
        for name in self._order:
            yield from self._classes[name].in_turn(most)

    def _take(self, item: T, *, served: bool) -> None:
        place = self._places.pop(item)
        line, group = place.line, place.line.group
        group.leave(line)
        del line.places[bisect_left(line.places, place.key, key=lambda other: other.key)]
        line.cost, line.work = line.cost - place.cost, line.work.minus(place.work)
        group.work, group.count = group.work.minus(place.work), group.count - 1
        line.counter += place.cost if served else 0
        if line.places:
            group.enter(line)
            return
        group.last = line.counter
        if not group.lines:
            self._order.remove(group.name)
        self._idle[group.name, line.tenant] = None
        while len(self._idle) > self._remembered:
            self._forget(*next(iter(self._idle)))

    def _forget(self, name: Any, tenant: str) -> None:
        del self._idle[name, tenant]
        group = self._classes[name]
        del group.known[tenant]
        if not group.known:
            del self._classes[name]


def _total(parts: Iterable[PromptWork]) -> PromptWork:
    total = NO_WORK
    for part in parts:
        total = total.plus(part)
    return total
