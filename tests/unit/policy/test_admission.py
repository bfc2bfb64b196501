"""Who is refused at the door, on literal fleets, and that a refusal is never a guess."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.layout import KVLayout
from pdserve.core.slo import SloTargets
from pdserve.policy.admission import RETRY_MAX, RETRY_MIN, Admission, admit
from pdserve.policy.batching import JOINING, SHARE
from pdserve.policy.disaggregation import NoWorker, Protect, Rules
from pdserve.policy.estimate import UNKNOWN, Speed
from pdserve.policy.fleet import AIM, BOTH, FleetView, LinkFacts, PlacementRequest, Role, Target, WorkerView
from pdserve.policy.forecast import Ahead
from pdserve.policy.predict import HANDOFF

LAYOUT = KVLayout(16, 2, 2, 16, "float32", bytes(16))
# A millisecond a prompt token; a step of answers takes 10 ms, and a millisecond for each.
SPEED = Speed(step=0.01, token=1e-3, answer=1e-3, prompts=10, answers=10)
NO_STEP = replace(SPEED, step=0.0)


def worker(worker_id: str, **options: object) -> WorkerView:
    """A worker by id: "p..." prefills, "d..." decodes; ample room, one chunk for any prompt."""
    made = WorkerView(
        worker_id=worker_id,
        role=Role.PREFILL if worker_id.startswith("p") else Role.DECODE,
        layout=LAYOUT,
        max_num_seqs=1000,
        max_num_batched_tokens=1 << 20,
        total_blocks=100_000,
        available_blocks=100_000,
        speed=NO_STEP if worker_id.startswith("p") else SPEED,
    )
    return replace(made, **options)  # type: ignore[arg-type]


def view(*workers: WorkerView, unanswered: tuple[str, ...] = ()) -> FleetView:
    return FleetView.of_workers(workers, unanswered)


def request(tokens: int = 100, ttft: float = 0.5, itl: float = 0.05, **options: object) -> PlacementRequest:
    """Planned with `ttft` and `itl`, so somewhat more was asked for; answers of 100 tokens are expected."""
    asked = SloTargets(ttft / AIM, itl / AIM, 99.0)
    made = PlacementRequest(tokens, 200, targets=asked, stated=BOTH, expected=100)
    return replace(made, **options)  # type: ignore[arg-type]


def waiting(tokens: int, count: int = 1) -> Ahead:
    return Ahead(tokens, tokens * tokens, count)


NOBODY = Ahead()
IDLE = view(worker("p0"), worker("d0"))


def close(value: float | None, expected: float) -> bool:
    assert value is not None
    return math.isclose(value, expected, abs_tol=1e-9)


def test_an_idle_fleet_takes_it_in_and_predicts_when() -> None:
    decided = admit(IDLE, request(), NOBODY)
    assert decided.admitted and decided.missed is None
    assert close(decided.ttft, 0.1 + HANDOFF) and close(decided.gap, 0.011)


def test_a_queue_at_the_worker_and_in_the_router_delays_the_first_token() -> None:
    fleet = view(worker("p0", reported_prefill_tokens=200), worker("d0", speed=UNKNOWN))
    decided = admit(fleet, request(), waiting(150))
    assert decided.admitted and close(decided.ttft, 0.2 + 0.15 + 0.1 + HANDOFF)
    refused = admit(fleet, request(), waiting(300))
    assert (refused.admitted, refused.missed) == (False, Target.TTFT)
    assert close(refused.ttft, 0.602) and close(refused.retry_after, 0.102)
    waits = "102 ms with nobody else there; 1 requests wait ahead in the router"
    assert refused.reason.endswith(f"it would come in 602 ms, {waits}")


def test_what_is_done_of_a_step_waits_no_more() -> None:
    """A worker tells of a step at its end. Of one of 400 ms half is over, which makes the difference here; of one that
    began long ago no more is over than there is of it, in case that it was stopped."""
    busy = worker("p0", reported_prefill_tokens=600, max_num_batched_tokens=400, step_since=50.0)
    fleet = view(busy, worker("d0", speed=UNKNOWN))
    assert admit(fleet, request(now=50.0), NOBODY).missed is Target.TTFT
    assert close(admit(fleet, request(now=50.2), NOBODY).ttft, 0.6 - 0.2 + 0.1 + HANDOFF)
    for later in (50.4, 1e6):
        decided = admit(fleet, request(now=later), NOBODY)
        assert decided.admitted and close(decided.ttft, 0.6 - 0.4 + 0.1 + HANDOFF)
    # What this router sent and the worker has not taken is not part of that step, whenever that began.
    sent = replace(busy, reported_prefill_tokens=0, prefill_tokens=600)
    assert admit(view(sent, worker("d0", speed=UNKNOWN)), request(now=1e6), NOBODY).missed is Target.TTFT


def test_what_waits_goes_to_whoever_is_free_first() -> None:
    """Queues of 0, 0.1 and 1 s fill up to one level: 0.3 s of work brings the first two to 0.2 s."""
    queues = [worker(f"p{index}", reported_prefill_tokens=tokens) for index, tokens in enumerate((0, 100, 1000))]
    decided = admit(view(*queues, worker("d0")), request(), waiting(300))
    assert close(decided.ttft, 0.2 + 0.1 + HANDOFF)
    # 5 s of work is more than the third has queue: (5 + 1.1) / 3.
    assert close(admit(view(*queues, worker("d0")), request(), waiting(5000)).ttft, 6.1 / 3 + 0.1 + HANDOFF)


def test_a_fast_worker_takes_more_of_it() -> None:
    fast = worker("p1", speed=replace(NO_STEP, token=0.25e-3))
    decided = admit(view(worker("p0"), fast, worker("d0")), request(), waiting(500))
    assert close(decided.ttft, 0.1 + 0.025 + HANDOFF)


def test_a_held_prefix_is_not_computed() -> None:
    decided = admit(IDLE, request(held={"p0": 5}), NOBODY)
    assert close(decided.ttft, 0.02 + HANDOFF)


def test_who_has_the_prompt_waits_behind_no_other() -> None:
    """All but a block of it is on the decode worker: 4 tokens there, however many wait for prefill workers."""
    decided = admit(IDLE, request(held={"d0": 6}), waiting(10_000))
    assert decided.admitted and close(decided.ttft, 0.01 + 4e-3)


def test_a_measured_slow_link_counts_and_one_that_nobody_measured_does_not() -> None:
    slow = LinkFacts(LAYOUT.token_bytes * 100 / 2.0, "tcp")  # two seconds for the prompt
    fleet = view(worker("p0", links={"d0": slow}), worker("d0", sequences=1))
    assert close(admit(fleet, request(ttft=5.0), NOBODY).ttft, 0.1 + HANDOFF + 1.9)
    unmeasured = view(worker("p0", links={"d0": LinkFacts(0.0, "tcp")}), worker("d0", sequences=1))
    assert close(admit(unmeasured, request(), NOBODY).ttft, 0.1 + HANDOFF)


def test_nobody_is_refused_on_a_guess() -> None:
    unknown = view(worker("p0", speed=UNKNOWN), worker("d0", speed=UNKNOWN))
    decided = admit(unknown, request(ttft=1e-6), waiting(1 << 30, 1000), time_left=1e-6)
    assert decided.admitted and decided.ttft is None and decided.gap is None
    # Too few steps to know are no measurement; one measured worker is what the others are taken for.
    few = replace(NO_STEP, prompts=3)
    assert admit(view(worker("p0", speed=few), worker("d0", speed=UNKNOWN)), request(), waiting(10_000)).admitted
    both = view(worker("p0", speed=UNKNOWN), worker("p1"), worker("d0", speed=UNKNOWN))
    assert close(admit(both, request(), waiting(200)).ttft, 0.1 + 0.1 + HANDOFF)


def test_a_target_that_nobody_stated_refuses_nobody() -> None:
    assert admit(IDLE, request(stated=frozenset()), waiting(10_000)).admitted
    assert admit(IDLE, request(stated=frozenset({Target.ITL})), waiting(10_000)).admitted
    assert not admit(IDLE, request(stated=frozenset({Target.TTFT})), waiting(10_000)).admitted
    crowd = view(worker("p0"), worker("d0", sequences=90))
    assert admit(crowd, request(stated=frozenset({Target.TTFT})), NOBODY).admitted


def test_a_target_that_nobody_could_keep_refuses_nobody() -> None:
    assert admit(IDLE, request(1000), waiting(10_000)).admitted  # a second of computing, for a target of half of one
    assert admit(IDLE, request(1000), waiting(10_000), time_left=0.9).admitted
    crowd = view(worker("p0"), worker("d0", sequences=90))
    assert admit(crowd, request(itl=0.0109), NOBODY).admitted


def test_a_twentieth_is_kept_in_hand() -> None:
    """Of what is predicted to be just in time every second one would be late."""
    asked = request(targets=SloTargets(0.5, 0.05, 99.0))
    assert admit(IDLE, asked, waiting(370)).admitted  # 472 ms
    refused = admit(IDLE, asked, waiting(380))
    said = "500 ms to the first token would not be kept with 5% in hand: it would come in 482 ms"
    said += ", 102 ms with nobody else there; 1 requests wait ahead in the router"
    assert (refused.missed, refused.reason) == (Target.TTFT, said)


def test_what_has_waited_already_counts() -> None:
    assert admit(IDLE, request(waited=0.39), NOBODY).admitted
    assert admit(IDLE, request(waited=0.3), waiting(90)).admitted
    assert admit(IDLE, request(waited=0.3), waiting(110)).missed is Target.TTFT


def test_hopeless_work_is_refused_whether_or_not_targets_are_stated() -> None:
    refused = admit(IDLE, request(stated=frozenset()), waiting(1000), time_left=1.0)
    assert (refused.missed, refused.admitted) == (Target.DEADLINE, False)
    assert close(refused.retry_after, 0.102)
    assert refused.reason.startswith("its deadline is in 1 s, and the first token would come in 1.1 s")
    assert admit(IDLE, request(stated=frozenset()), waiting(1000), time_left=1.2).admitted


def test_gaps_are_judged_by_the_load_when_the_prompt_is_through() -> None:
    """50 answers end evenly over 100 tokens x 60 ms: in the second that the prompt takes, a sixth of them."""
    crowd = view(worker("p0"), worker("d0", sequences=50))
    now = admit(crowd, request(1, ttft=2.0, itl=0.055), NOBODY, Rules(protect=Protect.TTFT))
    assert now.missed is Target.ITL and close(now.gap, 0.061)
    later = admit(crowd, request(1000, ttft=2.0, itl=0.055), NOBODY, Rules(protect=Protect.TTFT))
    assert later.admitted and close(later.gap, 0.01 + 0.042 + 0.001)


def test_where_gaps_are_protected_it_may_wait_as_long_as_its_first_token() -> None:
    crowd = view(worker("p0"), worker("d0", sequences=50))
    assert admit(crowd, request(1, ttft=2.0, itl=0.055), NOBODY).admitted
    refused = admit(crowd, request(1, ttft=0.5, itl=0.055), NOBODY)
    assert refused.missed is Target.ITL and close(refused.gap, 0.057)
    # 44.5 answers and itself are at most 55 ms: after 0.11 of their 6 s, half a second of which is granted.
    assert refused.retry_after == pytest.approx(0.66 - 0.5, abs=0.02)


def test_who_waits_ahead_will_have_joined() -> None:
    decided = admit(view(worker("p0"), worker("d0"), worker("d1")), request(), waiting(60, 60))
    assert close(decided.gap, 0.01 + 0.031)
    refused = admit(IDLE, request(), waiting(60, 60))
    assert refused.missed is Target.ITL and close(refused.gap, 0.01 + 0.061)


def test_without_a_length_to_expect_gaps_refuse_nobody() -> None:
    crowd = view(worker("p0"), worker("d0", sequences=90))
    assert not admit(crowd, request(), NOBODY).admitted
    decided = admit(crowd, request(expected=0), NOBODY)
    assert decided.admitted and decided.gap is None


def test_a_full_decode_worker_delays_the_first_token() -> None:
    """Ten seats are passed on once in 100 tokens x 20 ms: 0.2 s for each of those that want one."""
    full = view(worker("p0"), worker("d0", sequences=10, max_num_seqs=10))
    assert close(admit(full, request(ttft=2.0), NOBODY).ttft, 0.2 + 0.1 + HANDOFF)
    refused = admit(full, request(ttft=0.5), waiting(30, 3))
    assert refused.missed is Target.TTFT and close(refused.ttft, 0.8 + 0.1 + HANDOFF)
    free = view(worker("p0"), worker("d0", sequences=9, max_num_seqs=10))
    assert close(admit(free, request(), NOBODY).ttft, 0.1 + HANDOFF)


def test_pages_are_waited_for_as_seats_are() -> None:
    """100 pages are passed on in 100 tokens x 15 ms; 7 are wanted and 2 are free."""
    full = view(worker("p0"), worker("d0", sequences=5, total_blocks=100, available_blocks=2))
    assert close(admit(full, request(), NOBODY).ttft, 5 * 0.015 + 0.1 + HANDOFF)


def test_a_single_token_needs_no_decode_worker() -> None:
    full = view(worker("p0"), worker("d0", sequences=10, max_num_seqs=10))
    decided = admit(full, request(remaining=1), NOBODY)
    assert decided.admitted and close(decided.ttft, 0.1) and decided.gap is None


def test_decode_workers_compute_prompts_where_they_are_alone() -> None:
    refused = admit(view(worker("d0", reported_prefill_tokens=500)), request(), NOBODY)
    assert refused.missed is Target.TTFT and close(refused.ttft, 0.51 + 0.11)


def test_an_idle_decode_worker_may_help_prefill_workers_and_a_busy_one_does_not() -> None:
    queue = worker("p0", reported_prefill_tokens=10_000)
    assert close(admit(view(queue, worker("d0")), request(), NOBODY).ttft, 0.01 + 0.1)
    assert not admit(view(queue, worker("d0", sequences=1)), request(), NOBODY).admitted
    assert not admit(view(queue, worker("d0")), request(), NOBODY, Rules(local_prefill=False)).admitted
    # Beside answers that have a target it takes smaller chunks, and longer: its steps are 84 ms, 11 of them theirs.
    stated = view(queue, worker("d0", sequences=1, bounded=1))
    assert not admit(stated, request(), NOBODY).admitted  # 32 tokens at a time are too long already
    beside = admit(stated, request(itl=0.2), NOBODY)
    step = SHARE * JOINING * 0.2 / AIM
    assert beside.admitted and close(beside.ttft, 0.11 * step / (step - 0.011))
    # Each takes one of those ahead first.
    assert not admit(view(queue, worker("d0")), request(), waiting(1)).admitted
    assert admit(view(queue, worker("d0"), worker("d1")), request(), waiting(1)).admitted


def test_while_nobody_is_up_it_waits_as_the_rules_say() -> None:
    down = worker("p0", connected=False)
    assert admit(view(down, worker("d0", reported_prefill_tokens=900)), request(), NOBODY).ttft is None
    local = admit(
        view(down, worker("d0", reported_prefill_tokens=900)), request(), NOBODY, Rules(no_worker=NoWorker.LOCAL)
    )
    assert local.missed is Target.TTFT
    assert admit(FleetView(), request(), waiting(1000)).admitted
    assert admit(view(worker("d0"), unanswered=("127.0.0.1:1",)), request(), waiting(10_000)).admitted


def test_the_wait_that_is_told_is_bounded() -> None:
    assert admit(IDLE, request(), waiting(401)).retry_after == RETRY_MIN
    assert admit(IDLE, request(), waiting(1_000_000)).retry_after == RETRY_MAX
    endless = view(worker("p0"), worker("d0", sequences=900, speed=replace(SPEED, step=10.0)))
    assert admit(endless, request(itl=10.1), NOBODY).retry_after == RETRY_MAX


def test_of_a_large_fleet_a_sample_stands_for_all() -> None:
    """200 prefill workers share 20 s of prompts: 0.1 s for each."""
    workers = [worker(f"p{index}") for index in range(200)] + [worker(f"d{index}", sequences=1) for index in range(200)]
    decided = admit(view(*workers), request(), waiting(20_000))
    assert decided.ttft == pytest.approx(0.1 + 0.1 + HANDOFF, rel=1e-6)


loads = st.integers(0, 2000)
prefills = st.lists(loads, min_size=1, max_size=4)
decodes = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20_000)), min_size=1, max_size=4)


def fleet_of(prefill: list[int], decode: list[tuple[int, int]]) -> FleetView:
    return view(
        *(worker(f"p{index}", reported_prefill_tokens=tokens) for index, tokens in enumerate(prefill)),
        *(
            worker(f"d{index}", reported_sequences=answers, outstanding_tokens=tokens, speed=replace(SPEED, read=1e-6))
            for index, (answers, tokens) in enumerate(decode)
        ),
    )


def grown(values: list[int], more: list[int]) -> list[int]:
    return [value + extra for value, extra in zip(values, [*more, 0, 0, 0, 0], strict=False)]


@given(
    prefills, prefills, decodes, decodes, st.tuples(loads, st.integers(0, 50)), st.tuples(loads, st.integers(0, 50)),
    st.floats(0.11, 3.0), st.floats(0.012, 0.1), st.floats(0.11, 5.0),
)  # fmt: skip
def test_more_load_never_turns_a_refusal_into_an_admission(
    prefill: list[int],
    more_prefill: list[int],
    decode: list[tuple[int, int]],
    more_decode: list[tuple[int, int]],
    ahead: tuple[int, int],
    more_ahead: tuple[int, int],
    ttft: float,
    itl: float,
    time_left: float,
) -> None:
    asked = request(ttft=ttft, itl=itl)

    def decide(prefill: list[int], decode: list[tuple[int, int]], tokens: int, count: int) -> Admission:
        return admit(fleet_of(prefill, decode), asked, Ahead(tokens, 0, count), time_left=time_left)

    before = decide(prefill, decode, *ahead)
    crowd = [
        (answers + extra[0], tokens + extra[1])
        for (answers, tokens), extra in zip(decode, [*more_decode, *[(0, 0)] * 4], strict=False)
    ]
    after = decide(grown(prefill, more_prefill), crowd, ahead[0] + more_ahead[0], ahead[1] + more_ahead[1])
    assert before.ttft is not None and after.ttft is not None
    assert after.ttft >= before.ttft - 1e-9
    assert before.admitted or not after.admitted


@given(prefills, decodes, st.tuples(loads, st.integers(0, 50)), st.floats(0.11, 3.0), st.floats(0.11, 5.0))
def test_the_wait_that_is_told_is_at_least_what_is_missed_by(
    prefill: list[int], decode: list[tuple[int, int]], ahead: tuple[int, int], ttft: float, time_left: float
) -> None:
    decided = admit(fleet_of(prefill, decode), request(ttft=ttft), Ahead(ahead[0], 0, ahead[1]), time_left=time_left)
    assert decided.ttft is not None
    assert decided.admitted is (decided.retry_after == 0)
    if not decided.admitted:
        assert RETRY_MIN <= decided.retry_after <= RETRY_MAX
        missed = {Target.TTFT: ttft, Target.DEADLINE: time_left, Target.ITL: math.inf}[decided.missed or Target.ITL]
        assert decided.retry_after >= min(RETRY_MAX, decided.ttft - missed)
