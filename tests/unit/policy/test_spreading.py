"""Equals share the work, however their speeds were measured; those that are not equals do not."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from pdserve.core.layout import KVLayout
from pdserve.core.slo import SloTargets
from pdserve.policy.disaggregation import Rules
from pdserve.policy.estimate import NOMINAL, UNKNOWN, Speed
from pdserve.policy.fleet import BOTH, Assumed, FleetView, LinkFacts, PlacementRequest, Role, WorkerView
from pdserve.policy.predict import ALIKE
from pdserve.policy.routing import choose_pair

LAYOUT = KVLayout(16, 2, 2, 16, "float32", bytes(16))
SPEED = Speed(step=0.02, token=1e-4, answer=2e-4, read=1e-8, prompts=99, answers=99)
TOKENS = 128
REQUEST = PlacementRequest(TOKENS, 64, expected=64)


def times(speed: Speed, factor: float) -> Speed:
    """A worker that takes `factor` times as long for everything."""
    coefficients = (speed.step, speed.token, speed.square, speed.answer, speed.read)
    return Speed(*(factor * value for value in coefficients), prompts=speed.prompts, answers=speed.answers)


def worker(worker_id: str, speed: Speed) -> WorkerView:
    return WorkerView(
        worker_id=worker_id,
        role=Role.PREFILL if worker_id.startswith("p") else Role.DECODE,
        layout=LAYOUT,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        total_blocks=10_000,
        available_blocks=10_000,
        speed=speed,
    )


def placed(workers: list[WorkerView], count: int, request: PlacementRequest = REQUEST) -> Counter[str]:
    """So many equal requests at once, each accounted for as a router does; how many each decode worker got."""
    fleet, found = {each.worker_id: each for each in workers}, Counter[str]()
    for _ in range(count):
        decision = choose_pair(FleetView.of_workers(fleet.values()), request)
        assert decision.decode is not None, decision.reason
        found[decision.decode] += 1
        taker = fleet[decision.decode]
        fleet[taker.worker_id] = replace(
            taker,
            sequences=taker.sequences + 1,
            outstanding_tokens=taker.outstanding_tokens + TOKENS,
            placed=taker.placed + 1,
            in_flight_blocks=taker.in_flight_blocks + LAYOUT.blocks_for(TOKENS),
        )
        computes = fleet[decision.prefill or decision.decode]
        if decision.prefill is None:  # prefill workers are through with each before the next one comes
            fleet[computes.worker_id] = replace(
                computes,
                prefill_tokens=computes.prefill_tokens + TOKENS,
                prefill_squares=computes.prefill_squares + TOKENS**2,
            )
    return found


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("answer", [0.0, 2e-4], ids=["an answer costs nothing", "an answer costs something"])
def test_measurements_that_differ_by_noise_do_not_decide(seed: int, answer: float) -> None:
    rng = random.Random(seed)
    base = replace(SPEED, answer=answer, read=0.0 if not answer else SPEED.read)
    decodes = [worker(f"d{k}", times(base, rng.uniform(0.85, 1.2))) for k in range(4)]
    assert sorted(placed([worker("p0", SPEED), *decodes], 40).values()) == [10, 10, 10, 10]


def test_a_newcomer_gets_its_share_before_it_has_said_anything() -> None:
    fleet = [worker("p0", SPEED), worker("d0", times(SPEED, 1.3)), worker("d1", SPEED), worker("d2", UNKNOWN)]
    assert placed(fleet, 3) == {"d0": 1, "d1": 1, "d2": 1}


def test_a_newcomer_is_tried_beside_the_fastest() -> None:
    """Of two that were measured as differently as a busy machine can make it."""
    measured = [worker("p0", SPEED), worker("d0", times(SPEED, 4.0)), worker("d1", SPEED)]
    assert placed([*measured, worker("d2", UNKNOWN)], 4) == {"d1": 2, "d2": 2}
    assert placed([*measured, worker("d2", times(SPEED, 5.0))], 4) == {"d1": 4}


@pytest.mark.parametrize("seed", range(20))
def test_equal_workers_that_compute_prompts_too_share_them(seed: int) -> None:
    """More than those two at which a pair is looked for."""
    rng = random.Random(seed)
    fleet = [worker(f"d{k}", times(SPEED, rng.uniform(0.85, 1.2))) for k in range(8)]
    assert set(placed(fleet, 80).values()) == {10}


def test_a_short_prompt_goes_past_workers_that_have_long_ones_to_compute() -> None:
    """However few answers those have: there are more than two of them, and of all others each has more."""
    waiting = [replace(worker(f"d{k}", SPEED), sequences=1, reported_prefill_tokens=1500) for k in range(3)]
    full = [replace(worker(f"d{k}", SPEED), sequences=1, reported_prefill_tokens=9000) for k in range(3, 6)]
    idle = [replace(worker(f"d{k}", SPEED), sequences=4) for k in range(6, 8)]
    assert placed([*waiting, *full, *idle], 2) == {"d6": 1, "d7": 1}
    assert choose_pair(FleetView.of_workers([*full, waiting[0]]), REQUEST).decode == "d0"
    idle_now = [replace(worker(f"d{k}", SPEED), reported_prefill_tokens=2048 + 512) for k in range(5)]
    taking = replace(worker("d9", times(SPEED, 2.0)), sequences=9, reported_prefill_tokens=1900)
    assert choose_pair(FleetView.of_workers([*idle_now, taking]), REQUEST).decode == "d9", "the only one that takes any"


@pytest.mark.parametrize("factor", [1.6, 2.0, 3.0])
def test_a_worker_that_is_really_slow_gets_less(factor: float) -> None:
    """More than half as slow again is another kind of worker, not noise."""
    fast = [worker(f"d{k}", SPEED) for k in (1, 2)]
    found = placed([worker("p0", SPEED), worker("d0", times(SPEED, factor)), *fast], 30)
    assert found == {"d1": 15, "d2": 15}
    assert placed([worker("p0", SPEED), worker("d0", times(SPEED, factor)), fast[0]], 10) == {"d1": 10}


def test_targets_are_kept_by_what_a_worker_measures_itself() -> None:
    """Equals share as long as each of them keeps the target by its own measure."""
    fleet = [worker("p0", SPEED), worker("d0", times(SPEED, 1.3)), worker("d1", SPEED)]
    loose = replace(REQUEST, targets=SloTargets(5.0, 0.2, 99.0), stated=BOTH)
    assert placed(fleet, 20, loose) == {"d0": 10, "d1": 10}
    tight = replace(REQUEST, targets=SloTargets(5.0, 0.0265, 99.0), stated=BOTH)
    found = placed(fleet, 20, tight)
    assert found["d0"] == 0, "its answers would come 26.3 ms apart already when it has one, with 5% in hand"


def test_those_that_keep_a_target_are_not_crowded_out_by_equals_that_do_not() -> None:
    """However many there are of these, and though they would come first otherwise."""
    slow = [worker(f"d{k}", times(SPEED, 1.35)) for k in range(3)]
    fast = [replace(worker(f"d{k}", SPEED), placed=9) for k in range(3, 5)]
    asked = replace(REQUEST, targets=SloTargets(5.0, 0.0265, 99.0), stated=BOTH)
    assert placed([worker("p0", SPEED), *slow, *fast], 10, asked) == {"d3": 5, "d4": 5}
    late = [replace(worker(f"p{k}", times(SPEED, 1.4)), reported_prefill_tokens=1500) for k in range(3)]
    prompt = replace(asked, tokens=1000, targets=SloTargets(0.35, 5.0, 99.0))  # 0.29 s by the fast one, 0.41 by others
    in_time = replace(worker("p3", SPEED), placed=9, reported_prefill_tokens=1500)
    for remaining in (64, 1):
        fleet = FleetView.of_workers([*late, in_time, *fast])
        found = choose_pair(fleet, replace(prompt, remaining=remaining), Rules(local_prefill=False))
        assert found.prefill == "p3", remaining


def test_what_pulling_saves_is_saved_of_what_a_worker_is_chosen_by() -> None:
    """Where the decode worker has most of the prompt, an idle fast worker is not worth less than one that is slow."""
    link = LinkFacts(1e9, "sockets")
    for factor in (1.3, 1.9):
        slow, fast = worker("p0", times(SPEED, factor)), replace(worker("p1", SPEED), placed=1)
        decode = replace(worker("d0", SPEED), links={"p0": link, "p1": link}, sequences=30)
        asked = replace(REQUEST, tokens=1024, held={"d0": 60})
        decision = choose_pair(FleetView.of_workers([slow, fast, decode]), asked)
        assert all(option.cost > 0 for option in decision.options)
        remote = [option.prefill for option in decision.options if option.prefill]
        assert remote[0] == ("p0" if factor < ALIKE else "p1")


def test_nobody_knows_anything_at_first() -> None:
    assert Assumed.of([worker("d0", UNKNOWN)]) == Assumed(NOMINAL, NOMINAL)
    fast, slow = (replace(times(SPEED, factor), answers=0) for factor in (0.5, 1.0))
    gone = replace(worker("p2", times(SPEED, 0.1)), connected=False)
    some = Assumed.of([worker("d0", UNKNOWN), worker("p0", slow), worker("p1", fast), gone])
    assert some.prompts == fast and some.answers is NOMINAL


def test_alike_is_wider_than_the_noise_of_a_busy_machine() -> None:
    """What the tests above call noise is within it, what they call slow is not."""
    assert 1.2 / 0.85 < ALIKE < 1.6
