"""What a decision says of itself: why a prompt stays on a decode worker, and what else there was to choose from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.core.layout import KVLayout
from pdserve.core.slo import SloTargets
from pdserve.policy.batching import LEAST
from pdserve.policy.disaggregation import Local, NoWorker, Rules
from pdserve.policy.estimate import Speed
from pdserve.policy.fleet import FleetView, PlacementRequest, Role, Target, WorkerView
from pdserve.policy.routing import SHOWN, Kind, choose_pair, choose_prefill

LAYOUT = KVLayout(16, 2, 2, 16, "float32", bytes(16))
SLOW = Speed(step=5e-3, token=1e-3, answer=1e-4, read=1e-7, prompts=9, answers=9)


def worker(worker_id: str, speed: Speed = SLOW) -> WorkerView:
    """By id: "p..." prefills, "d..." decodes; 100 blocks, all free."""
    role = Role.PREFILL if worker_id.startswith("p") else Role.DECODE
    return WorkerView(worker_id, role, LAYOUT, 8, 512, 100, 100, speed=speed)


def view(*workers: WorkerView) -> FleetView:
    return FleetView.of_workers(workers)


REQUEST = PlacementRequest(64, 100)


def test_a_fleet_without_prefill_workers_says_so() -> None:
    alone = choose_pair(view(worker("d0")), REQUEST)
    assert (alone.kind, alone.options[0].local) == (Kind.LOCAL, Local.NO_PREFILL_WORKERS)
    down = replace(worker("p0"), connected=False)
    told = choose_pair(view(down, worker("d0")), REQUEST, Rules(no_worker=NoWorker.LOCAL))
    assert (told.kind, told.options[0].local) == (Kind.LOCAL, Local.NO_PREFILL_WORKERS)


def test_a_prompt_that_is_there_is_held() -> None:
    decision = choose_pair(view(worker("p0"), worker("d0")), replace(REQUEST, held={"d0": 3}))
    assert (decision.kind, decision.options[0].local, decision.options[0].cached) == (Kind.LOCAL, Local.HELD, 48)


def test_a_prompt_that_is_quicker_here_is_conditional() -> None:
    busy = replace(worker("p0"), prefill_tokens=500)
    decision = choose_pair(view(busy, worker("d0")), REQUEST)
    assert (decision.kind, decision.options[0].local) == (Kind.LOCAL, Local.CONDITIONAL)
    assert decision.considered == len(decision.options) == 2
    assert decision.options[1].prefill == "p0" and decision.options[1].local is None


def test_a_prompt_beside_answers_is_computed_in_chunks_that_keep_their_target() -> None:
    """64 tokens are 69 ms at once, and a gap 5.05 ms: too long for 50 ms, which nobody need see. Not so in steps of 32
    tokens, the least, which take the prompt a little longer."""
    fleet = view(replace(worker("p0"), prefill_tokens=500), replace(worker("d0"), sequences=1, bounded=1))
    targets = SloTargets(2.0, 0.05, 99.0)
    stated = choose_pair(fleet, replace(REQUEST, targets=targets, stated=frozenset({Target.ITL})))
    alone = next(option for option in stated.options if option.local)
    assert (stated.kind, alone.slow) == (Kind.LOCAL, 0.0)
    least = LEAST * 1e-3
    assert alone.compute == pytest.approx(0.069 * (least + 5.05e-3) / least, rel=1e-2)
    only_measured = choose_pair(fleet, replace(REQUEST, targets=targets))
    unbounded = next(option for option in only_measured.options if option.local)
    assert unbounded.slow > 0 and unbounded.compute == pytest.approx(0.069)


def test_what_answers_would_lose_counts_where_both_ways_are_late() -> None:
    """Eight would wait 69 ms each for it here, 0.6 s in all: sooner than behind 1,100 tokens, and not than behind 300,
    though its own first token would be."""
    seven = replace(worker("d0"), sequences=7)
    asked = replace(REQUEST, targets=SloTargets(0.01, 10.0, 99.0))
    for queued, kinds in ((1100, [Kind.LOCAL]), (300, [Kind.REMOTE, Kind.DEFER])):
        found = choose_pair(view(replace(worker("p0"), prefill_tokens=queued), seven), asked)
        here, there = (next(o for o in found.options if (o.local is None) is remote) for remote in (False, True))
        assert here.ttft < there.ttft and min(here.late, there.late) > 0
        assert found.kind in kinds


def test_a_decision_shows_the_best_of_all_that_it_considered() -> None:
    fleet = view(*(worker(f"{role}{number}") for role in "pd" for number in range(3)))
    decision = choose_pair(fleet, replace(REQUEST, held={"p1": 2, "d2": 1}))
    assert decision.considered > len(decision.options) == SHOWN
    best = decision.options[0]
    assert (best.prefill, best.decode) == (decision.prefill, decision.decode) == ("p1", "d2")
    assert (best.cached, best.there) == (32, 16)


def test_a_single_token_has_candidates_too() -> None:
    idle, busy = worker("p1"), replace(worker("p0"), prefill_tokens=100)
    decision = choose_pair(view(busy, idle, worker("d0")), replace(REQUEST, remaining=1))
    assert decision.kind is Kind.PREFILL_ONLY and decision.considered == 2
    assert [(option.prefill, option.decode) for option in decision.options] == [("p1", None), ("p0", None)]
    assert decision.options[0].ttft < decision.options[1].ttft and decision.options[0].gap == 0


def test_another_prefill_worker_for_a_reservation_is_explained() -> None:
    decision = choose_prefill(view(worker("p0"), worker("p1"), worker("d0")), REQUEST, "d0")
    assert decision.kind is Kind.REMOTE and decision.decode is None
    assert decision.considered == 2 and decision.options[0].prefill == decision.prefill


def test_speeds_that_nobody_told_are_said_to_be_assumed() -> None:
    def measured(prefill: Speed, decode: Speed) -> bool:
        return choose_pair(view(worker("p0", prefill), worker("d0", decode)), REQUEST).options[0].measured

    assert measured(SLOW, SLOW)
    assert not measured(Speed(), SLOW) and not measured(SLOW, Speed())
    assert measured(replace(SLOW, answers=0), replace(SLOW, prompts=0)), "each is asked for its own part"
