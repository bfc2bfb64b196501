"""Who is asked what, and when: open loops keep their times, closed loops their number, conversations their order."""

from __future__ import annotations

from collections import Counter

import pytest

from pdserve.bench.prompts import Prompts
from pdserve.bench.record import Record
from pdserve.bench.runner import Runner
from pdserve.core.errors import ConfigError
from pdserve.simulator.workload import Arrival, Lengths, Synthetic
from tests.unit.bench.targets import Holding, Reciter, Silent

IDS = range(100, 300)
TALKS = Synthetic(500.0, Lengths(20), Lengths(5), turns=3, think=0.001, reading=1e6, system=32)


def runner(target: Reciter, seen: list[Record] | None = None, timeout: float = 60.0) -> Runner:
    return Runner(target, Prompts(1, IDS), timeout, (seen if seen is not None else []).append)


async def test_an_open_loop_sends_each_when_it_is_due() -> None:
    """Never before, and the clock of each starts then; lengths are exact."""
    arrivals, seen = [Arrival(0.0, 30, 4), Arrival(0.02, 10, 2), Arrival(0.02, 11, 1)], list[Record]()
    target = Reciter()
    run = await runner(target, seen).open_loop(arrivals)
    assert [record.at for record in run.records] == [0.0, 0.02, 0.02]
    assert all(record.sent is not None and record.sent >= record.at for record in run.records)
    assert [record.error for record in run.records] == [None] * 3
    assert {number: len(prompt) for number, prompt in target.asked.items()} == {0: 30, 1: 10, 2: 11}
    assert sorted(record.number for record in seen) == [0, 1, 2]
    assert run.seconds >= 0.02 and run.strain.lateness.count == 3


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    """All requests are under way before the first is answered."""
    target = Holding(crowd=8, last=8)
    run = await runner(target).open_loop([Arrival(0.001 * number, 4, 1) for number in range(8)])
    assert target.most == 8 and not any(record.error for record in run.records)


@pytest.mark.parametrize("streams", [1, 3, 50])
async def test_a_closed_loop_holds_its_number(streams: int) -> None:
    """So many are asked at any time, and never more, until there are no more requests."""
    count = 12
    target = Holding(crowd=min(streams, count), last=count)
    run = await runner(target).closed_loop([Arrival(9.0, 4, 2) for _ in range(count)], streams)
    assert target.most == min(streams, count)
    assert len(run.records) == count and not any(record.error for record in run.records)


@pytest.mark.parametrize("closed", [False, True])
async def test_a_later_turn_goes_on_from_the_answers(closed: bool) -> None:
    """Its prompt is all that was said, answers included, and new tokens; it waits for its predecessor."""
    arrivals, target = TALKS.arrivals(40, seed=2), Reciter()
    going = runner(target)
    run = await (going.closed_loop(arrivals, 4) if closed else going.open_loop(arrivals))
    assert not any(record.error for record in run.records)
    latest, turns = dict[int | None, Record](), Counter[int | None]()
    for record in run.records:
        session, prompt = record.arrival.session, target.asked[record.number]
        if session in latest:
            before = latest[session]
            said = target.asked[before.number] + [1, 2, 3, 4, 5]
            assert prompt[: len(said)] == said and len(prompt) == len(said) + 20
            assert record.at >= before.ended and (closed or record.at >= record.arrival.at)
        assert prompt[:32] == target.asked[0][:32]  # the system prompt is everybody's
        latest[session] = record
        turns[session] += 1
    assert max(turns.values()) == 3


async def test_errors_are_kept_and_nobody_else_suffers() -> None:
    run = await runner(Reciter(refused=7)).open_loop([Arrival(0.0, 7, 3), Arrival(0.0, 8, 3)])
    refused, answered = run.records
    assert refused.error == "RESOURCE_EXHAUSTED: no room" and refused.ttft is None
    assert answered.error is None and answered.tokens == 3


async def test_a_request_may_take_so_long() -> None:
    run = await runner(Silent(), timeout=0.01).closed_loop([Arrival(0.0, 7, 3)], 1)
    assert run.records[0].error == "DEADLINE_EXCEEDED: no whole answer after 0.01 s"
    assert run.records[0].e2e >= 0.01


async def test_a_bug_of_a_target_is_no_figure() -> None:
    class Broken(Reciter):
        async def ask(self, prompt: object, record: Record) -> None:
            raise KeyError("a bug")

    with pytest.raises(ExceptionGroup, match="unhandled"):
        await runner(Broken()).open_loop([Arrival(0.0, 7, 3)])


async def test_more_than_memory_should_hold() -> None:
    with pytest.raises(ConfigError, match="--requests says how many"):
        await runner(Reciter()).open_loop([Arrival(0.0, 1 << 20, 1)] * 300)
