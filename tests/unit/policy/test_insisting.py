"""Who insists on short gaps waits, and holds up nobody but those of its own who want no less; on literal views."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.core.layout import KVLayout
from pdserve.core.slo import SloTargets
from pdserve.policy.disaggregation import Rules
from pdserve.policy.estimate import Speed
from pdserve.policy.fleet import FleetView, PlacementRequest, Role, Target, WorkerView
from pdserve.policy.queueing import Terms, plan_pass
from pdserve.policy.routing import OVERTAKEN, Kind, choose_pair, choose_prefill

LAYOUT = KVLayout(16, 2, 2, 16, "float32", bytes(16))
SPEED = Speed(step=0.01, token=1e-4, answer=1e-3, prompts=9, answers=9)  # an idle worker: 11 ms a token


def worker(worker_id: str, **options: object) -> WorkerView:
    role = Role.PREFILL if worker_id.startswith("p") else Role.DECODE
    made = WorkerView(worker_id, role, LAYOUT, 64, 1 << 16, total_blocks=1000, available_blocks=1000, speed=SPEED)
    return replace(made, **options)  # type: ignore[arg-type]


BUSY = FleetView.of_workers([worker("p0"), worker("d0", reported_sequences=20)])  # one more answer: 31 ms a token


def asks(itl: float, **options: object) -> PlacementRequest:
    """With gaps of `itl` seconds stated; 0: with none."""
    made = PlacementRequest(64, 100)
    if itl:
        made = replace(made, targets=SloTargets(10.0, itl, 99.0), stated=frozenset({Target.ITL}))
    return replace(made, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("itl, waits", [(0.001, False), (0.0115, False), (0.012, True), (0.032, True), (0.034, False)])
def test_it_waits_for_what_an_idle_worker_would_keep(itl: float, waits: bool) -> None:
    """5% in hand: 11 ms are kept for whoever asks for 11.6. What nobody could keep is nobody's to wait for."""
    decision = choose_pair(BUSY, asks(itl))
    assert (decision.kind is Kind.WAIT, decision.lets_pass) == (waits, waits)
    assert waits or decision.placed


def test_the_fastest_worker_says_what_could_be_kept() -> None:
    """It is full now, and will not always be."""
    fast = worker("d1", reported_sequences=64, speed=replace(SPEED, step=1e-3))
    prefill, slow = worker("p0"), worker("d0", reported_sequences=20)
    fleet = FleetView.of_workers([prefill, slow, fast])
    assert choose_pair(fleet, asks(0.005)).kind is Kind.WAIT
    down = FleetView.of_workers([prefill, slow, replace(fast, connected=False)])
    assert choose_pair(down, asks(0.005)).kind is Kind.REMOTE


def test_whoever_was_overtaken_often_enough_takes_what_there_is() -> None:
    assert choose_pair(BUSY, asks(0.02, overtaken=OVERTAKEN - 1)).kind is Kind.WAIT
    decision = choose_pair(BUSY, asks(0.02, overtaken=OVERTAKEN))
    assert decision.kind is Kind.REMOTE and decision.reason.startswith("least violation")


Asked = list[tuple[str, PlacementRequest]]  # whose, and what


def run(waiting: Asked, overtaken: dict[int, int] | None = None, looks: int = 16) -> list[tuple[int, Kind]]:
    """One pass over a fleet that stays as it is; requests by their place."""

    def terms(item: int) -> Terms | None:
        owner, request = waiting[item]
        return Terms(owner, request.targets.itl) if request.stated else None

    steps = plan_pass(
        range(len(waiting)),
        lambda: BUSY,
        lambda item: waiting[item][1],
        lambda item, view, request: choose_pair(view, request, Rules(local_prefill=False)),
        looks,
        terms_of=terms,
        overtaken=overtaken,
    )
    return [(item, decision.kind) for item, decision in steps]


def test_others_pass_who_insists() -> None:
    """Who states nothing, other tenants, and the same tenant's that are content with less; not those who want as much
    or more: they are not even asked."""
    waiting = [("a", asks(0.02)), ("a", asks(0.02)), ("a", asks(0.015)), ("a", asks(0.0)), ("a", asks(0.04))]
    waiting += [("b", asks(0.02)), ("b", asks(0.05)), ("b", asks(0.0))]
    assert run(waiting) == [
        (0, Kind.WAIT), (3, Kind.REMOTE), (4, Kind.REMOTE), (5, Kind.WAIT), (6, Kind.REMOTE), (7, Kind.REMOTE)
    ]  # fmt: skip


def test_any_number_of_those_who_insist_hold_up_nobody_else() -> None:
    """Each wants a little less than the one before it, so that none need be skipped: two of each owner are asked, and
    of all as many as there are looks."""
    waiting = [("a", asks(0.015 + 1e-4 * index)) for index in range(40)]
    waiting += [("b", asks(0.05)), ("a", asks(0.0)), *((str(owner), asks(0.02)) for owner in range(40))]
    found = run(waiting, looks=16)
    assert found[:4] == [(0, Kind.WAIT), (1, Kind.WAIT), (40, Kind.REMOTE), (41, Kind.REMOTE)]
    assert found[4:] == [(index, Kind.WAIT) for index in range(42, 56)]


def test_who_goes_before_one_that_insists_is_counted() -> None:
    overtaken: dict[int, int] = {}
    waiting = [("b", asks(0.0)), ("a", asks(0.02)), ("b", asks(0.0)), ("b", asks(0.02)), ("b", asks(0.0))]
    run(waiting, overtaken)
    assert overtaken == {1: 2, 3: 1}
    run(waiting, overtaken)
    assert overtaken == {1: 4, 3: 2}


def test_who_is_not_even_asked_is_counted_too() -> None:
    """Else only the head of a line would get nearer to its turn."""
    overtaken: dict[int, int] = {}
    run([("a", asks(0.02)), ("a", asks(0.02)), ("a", asks(0.015)), ("b", asks(0.0))], overtaken)
    assert overtaken == {0: 1, 1: 1, 2: 1}


def test_pages_are_waited_for_by_everybody() -> None:
    """Also where the one that needs them insists on short gaps."""
    large = asks(0.02, tokens=17_000)
    assert choose_pair(BUSY, large).kind is Kind.NEVER
    fleet = FleetView.of_workers([worker("p0"), worker("d0", reported_sequences=20, available_blocks=100)])
    decision = choose_pair(fleet, asks(0.02, tokens=4000))
    assert (decision.kind, decision.lets_pass) == (Kind.WAIT, False)


def test_a_reservation_that_nobody_can_fill_holds_up_nobody() -> None:
    """Its prefill workers are all down, or it is gone itself; where one only lacks room, everybody waits for that."""
    down = FleetView.of_workers([worker("p0", connected=False), worker("d0")])
    full = FleetView.of_workers([worker("p0", available_blocks=0), worker("d0")])
    for fleet, decode, passes in ((down, "d0", True), (down, "d9", True), (full, "d0", False)):
        decision = choose_prefill(fleet, asks(0.0), decode)
        assert (decision.kind, decision.lets_pass, decision.down) == (Kind.WAIT, passes, False)
