"""The dispatcher over workers that are only books: who is placed, what is said, and that a bug stops nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from pdserve.core.errors import Unavailable
from pdserve.core.layout import KVLayout
from pdserve.core.slo import SloTargets
from pdserve.policy.disaggregation import NoWorker, Rules
from pdserve.policy.fleet import FleetView, Target
from pdserve.router.config import RouterSettings
from pdserve.router.dispatch import DOWN_RETRY, Dispatcher
from pdserve.router.fleet import Fleet
from pdserve.router.models import Models, ServedModel
from pdserve.router.waiting import Account, Refusals, Waiting, Wishes
from pdserve.router.worker import Worker
from pdserve.rpc.convert import layout_to_proto
from pdserve.v1 import worker_pb2

LAYOUT = KVLayout(16, 2, 2, 16, "float32", bytes(16))
MODEL, OTHER = (ServedModel(name, Path(name), frozenset({name}), cast(Any, None), None, ()) for name in ("m", "other"))
PATIENCE = 5.0


class Books(Fleet):
    """A fleet to which nothing is connected."""

    def __init__(self) -> None:
        super().__init__(RouterSettings.load([]), Models((MODEL, OTHER)))
        self.broken = ""  # the name of the model whose view fails

    def view(self, model: ServedModel) -> FleetView:
        if model.name == self.broken:
            raise RuntimeError("no view")
        return super().view(model)

    def add(self, name: str, model: str = "m", seats: int = 8, stored: tuple[bytes, ...] = ()) -> Worker:
        """A worker by id: "p..." prefills, "d..." decodes."""
        worker = self.adopt(name)
        snapshot = worker_pb2.WorkerSnapshot(
            worker_id=name,
            incarnation="1",
            role=worker_pb2.ROLE_PREFILL if name.startswith("p") else worker_pb2.ROLE_DECODE,
            model=model,
            layout=layout_to_proto(LAYOUT),
            total_blocks=1000,
            max_num_seqs=seats,
            max_num_batched_tokens=512,
        )
        worker.up(snapshot, None, None)
        worker.take_delta(
            worker_pb2.WorkerDelta(sequence=1, load=worker_pb2.WorkerLoad(free_blocks=1000), stored=stored)
        )
        return worker

    def lose(self, worker: Worker) -> None:
        worker.connected = False
        self.changed(worker)


class Asker:
    """Requests for the model, in the order in which they come."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.placed: list[str] = []

    def waiting(self, tenant: str = "", tokens: int = 100, **options: Any) -> Waiting:
        settings: dict[str, Any] = {
            "model": MODEL, "remaining": 500, "priority": 0, "replay": False, "arrived": 0.0,
            "arrival": self.dispatcher.next_arrival(), "hashes": {}, "refusals": Refusals(), "wishes": Wishes(tenant),
        }  # fmt: skip
        return Waiting(tokens=tokens, **{**settings, **options})

    async def ask(self, name: str, after: Callable[[Waiting], None] = lambda item: None, **options: Any) -> None:
        """Be placed, and over at once."""
        item = self.waiting(**options)
        assignment = await self.dispatcher.place(item, PATIENCE)
        self.placed.append(name)
        after(item)
        assignment.release()
        self.dispatcher.wake(now=True)


async def stopped(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def hashes(count: int) -> Mapping[KVLayout, list[bytes]]:
    return {LAYOUT: [bytes([number]) * 16 for number in range(count)]}


async def test_what_waits_is_work_as_far_as_nobody_holds_it() -> None:
    """A prompt that is cached, a replay, and one of which nothing is known anywhere."""
    fleet = Books()
    fleet.add("d0", seats=0, stored=tuple(hashes(60)[LAYOUT]))
    asker = Asker(dispatcher := Dispatcher(fleet, 10))
    asked: list[dict[str, Any]] = [{"tokens": 1000, "hashes": hashes(62)}, {"tokens": 300, "replay": True}]
    waits = [
        asyncio.create_task(dispatcher.place(asker.waiting(**options), PATIENCE))
        for options in (*asked, {"tokens": 50})
    ]
    await asyncio.wait(waits, timeout=0)
    ahead = dispatcher.ahead(MODEL, Wishes(), 0)
    assert (ahead.tokens, ahead.count) == (1000 - 60 * 16 + 300 + 50, 3)
    assert ahead.squares == 1000**2 - 960**2 + 300**2 + 50**2
    await stopped(*waits)


async def test_who_finds_nobody_waiting_waits_for_no_turn_of_the_loop() -> None:
    fleet = Books()
    fleet.add("d0", seats=1)
    asker = Asker(dispatcher := Dispatcher(fleet, 10))
    with pytest.raises(StopIteration) as over:
        dispatcher.place(asker.waiting(), PATIENCE).send(None)
    waits = asyncio.create_task(dispatcher.place(asker.waiting(), PATIENCE))
    await asyncio.wait([waits], timeout=0)
    assert dispatcher.waiting(MODEL) == 1
    over.value.value.release()
    dispatcher.wake(now=True)
    (await asyncio.wait_for(waits, PATIENCE)).release()


async def test_those_who_come_in_one_turn_of_the_loop_are_placed_by_rank() -> None:
    """All but the first, which cannot know of the others. One place is left for them, and it goes by priority."""
    fleet = Books()
    fleet.add("d0", seats=2)
    asker = Asker(dispatcher := Dispatcher(fleet, 10, Rules(max_priority=9)))
    come = [
        asyncio.create_task(dispatcher.place(asker.waiting(priority=priority), PATIENCE)) for priority in (0, 0, 0, 9)
    ]
    done, waits = set[asyncio.Task[Any]](), set(come)
    async with asyncio.timeout(PATIENCE):
        while len(done) < 2:
            more, waits = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            done |= more
    assert done == {come[0], come[3]}
    for task in done:
        task.result().release()
    await stopped(*waits)


@pytest.mark.parametrize("empty, order", [(False, "ababa"), (True, "abaab")])
async def test_an_answer_is_charged_when_it_begins_and_settled_when_it_ends(empty: bool, order: str) -> None:
    """One place. Answers were of 1,000 tokens lately, so that prompts of 10 and of 600 tokens cost about as much; until
    it turns out that they are empty."""
    fleet = Books()
    fleet.add("d0", seats=1)
    asker = Asker(dispatcher := Dispatcher(fleet, 10))
    dispatcher.answered(MODEL, Wishes(), 0, 1000, Account(), whole=True)
    assert dispatcher.expected(MODEL) == 1000

    def over(item: Waiting) -> None:
        if empty:
            dispatcher.answered(MODEL, item.wishes, 0, 0, item.account, whole=False)

    held = await dispatcher.place(asker.waiting("c"), PATIENCE)
    asked = (("a", 10), ("a", 10), ("a", 10), ("b", 600), ("b", 600))
    waits = [
        asyncio.create_task(asker.ask(tenant, over, tenant=tenant, tokens=tokens, remaining=1000))
        for tenant, tokens in asked
    ]
    await asyncio.wait(waits, timeout=0)
    held.release()
    dispatcher.wake(now=True)
    await asyncio.gather(*waits)
    assert "".join(asker.placed) == order


@pytest.mark.parametrize("most, order", [(0, "first late"), (5, "late first"), (3, "late first")])
async def test_a_priority_counts_up_to_the_operator_s_limit(most: int, order: str) -> None:
    """By default nobody goes before others by naming one; behind them whoever wants."""
    fleet = Books()
    worker = fleet.add("d0", seats=0)
    asker = Asker(Dispatcher(fleet, 10, Rules(max_priority=most)))
    named = (("behind", -1), ("first", 0), ("late", 5))
    waits = [asyncio.create_task(asker.ask(name, priority=priority)) for name, priority in named]
    await asyncio.wait(waits, timeout=0)
    assert asker.dispatcher.ahead(MODEL, Wishes(), 9).count == (1 if most else 2)
    assert worker.snapshot is not None
    worker.snapshot.max_num_seqs = 1
    fleet.changed(worker)
    await asyncio.gather(*waits)
    assert " ".join(asker.placed) == f"{order} behind"


async def test_a_stated_gap_holds_up_nobody_else() -> None:
    """An idle worker would keep the one that 40 requests of a tenant ask for, and nobody the one of another; so that
    one is placed, and who asks for none."""
    fleet = Books()
    worker = fleet.add("d0", seats=99)
    speed = worker_pb2.WorkerSpeed(step_seconds=0.01, answer_seconds=1e-3, prompt_steps=9, answer_steps=9)
    load = worker_pb2.WorkerLoad(free_blocks=1000, running=20, speed=speed)
    worker.take_delta(worker_pb2.WorkerDelta(sequence=2, load=load))
    asker = Asker(Dispatcher(fleet, 99))

    def asks(tenant: str, itl: float) -> dict[str, Any]:
        return {"wishes": Wishes(tenant, targets=SloTargets(9.0, itl, 99.0), stated=frozenset({Target.ITL}))}

    waits = [asyncio.create_task(asker.ask("keepable", **asks("a", 0.02))) for _ in range(40)]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asker.ask("hopeless", **asks("b", 1e-6)))
        tasks.create_task(asker.ask("plain", tenant="a"))
    assert sorted(asker.placed) == ["hopeless", "plain"]
    await stopped(*waits)


async def test_a_reservation_without_a_prefill_worker_waits_alone() -> None:
    """It is first in the queue, and neither holds up those behind it nor makes them wait for longer than the rules
    say, however often the fleet changes."""
    fleet = Books()
    decode, prefill = fleet.add("d0"), fleet.add("p0")
    fleet.lose(prefill)
    asker = Asker(Dispatcher(fleet, 10, Rules(no_worker_seconds=0.2)))
    rearm = asyncio.create_task(asker.dispatcher.place(asker.waiting(decode="d0"), PATIENCE))
    others = [asyncio.create_task(asker.dispatcher.place(asker.waiting(), PATIENCE)) for _ in range(2)]
    while not all(other.done() for other in others):
        fleet.changed(decode, membership=False)
        await asyncio.wait(others, timeout=0.01)
    for other in others:
        error = other.exception()
        assert isinstance(error, Unavailable) and "all prefill workers are down" in str(error), error
    assert not rearm.done()
    await stopped(rearm)


@pytest.mark.parametrize("seconds, told", [(0.0, DOWN_RETRY), (7.0, 7.0), (600.0, 30.0)])
async def test_whoever_is_told_that_nobody_is_up_is_told_to_wait(seconds: float, told: float) -> None:
    rules = Rules(no_worker=NoWorker.FAIL, no_worker_seconds=seconds)
    asker = Asker(Dispatcher(Books(), 10, rules))
    with pytest.raises(Unavailable, match="no decode worker is up") as caught:
        await asker.ask("a")
    assert caught.value.retry_after == told


async def test_a_queue_has_one_timer_however_often_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Books()
    worker = fleet.add("d0")
    fleet.lose(worker)
    asker = Asker(dispatcher := Dispatcher(fleet, 10, Rules(no_worker_seconds=60)))
    loop, timers = asyncio.get_running_loop(), list[float]()
    call_at = loop.call_at

    def counted(when: float, callback: Any, *args: Any, **options: Any) -> asyncio.TimerHandle:
        if callback == dispatcher.wake:
            timers.append(when)
        return call_at(when, callback, *args, **options)

    monkeypatch.setattr(loop, "call_at", counted)
    item = asker.waiting()
    waits = asyncio.create_task(dispatcher.place(item, PATIENCE))
    for _ in range(20):
        dispatcher.wake(now=True)
        while item.reason != "no decode worker is up":
            await asyncio.wait([waits], timeout=0)
        item.reason = ""
    assert timers == [pytest.approx(item.queued + 60, abs=0.1)]
    await stopped(waits)


class Broken(Refusals):
    def standing(self, now: float) -> frozenset[str]:
        raise RuntimeError("a bug")


async def test_a_bug_stops_neither_those_behind_nor_other_models() -> None:
    fleet = Books()
    fleet.add("d0", seats=1)
    fleet.add("d1", model="other")
    asker = Asker(dispatcher := Dispatcher(fleet, 10))
    broken = asyncio.create_task(asker.ask("broken", refusals=Broken()))
    await asyncio.wait_for(asker.ask("behind"), PATIENCE)
    with pytest.raises(RuntimeError, match="a bug"):
        await broken
    held = await dispatcher.place(asker.waiting(), PATIENCE)
    waits = asyncio.create_task(asker.ask("waits"))
    await asyncio.wait([waits], timeout=0)
    assert dispatcher.waiting(MODEL) == 1
    fleet.broken = MODEL.name
    await asyncio.wait_for(asker.ask("other", model=OTHER), PATIENCE)
    assert asker.placed == ["behind", "other"]
    fleet.broken = ""
    held.release()
    dispatcher.wake(now=True)
    await asyncio.wait_for(waits, PATIENCE)
