"""One step's tokens, and who gives way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.policy.batching import JOINED, LEAST, SHARE, Claim, Joining, Work, choose_victim, plan_step
from pdserve.policy.estimate import ENOUGH, Speed

WORK = st.lists(
    st.one_of(st.builds(Work, st.just(1), st.just(False)), st.builds(Work, st.integers(1, 500), st.just(True)))
)


def test_streams_go_before_prompts_and_prompts_share_the_rest_in_order() -> None:
    work = [Work(300, True), Work(1, False), Work(50, True), Work(1, False)]
    assert plan_step(work, 256) == [254, 1, 0, 1]
    assert plan_step(work, 340) == [300, 1, 38, 1]
    assert plan_step(work, 1) == [1, 1, 0, 1]


@given(WORK, st.integers(1, 600))
def test_the_budget_is_used_and_kept(work: list[Work], budget: int) -> None:
    counts = plan_step(work, budget)
    assert all(0 <= count <= item.pending for count, item in zip(counts, work, strict=True))
    streams = sum(not item.prefill for item in work)
    assert sum(counts) == min(max(budget, streams + 1), sum(item.pending for item in work))


# 10 ms a step and 1 ms for each of its answers; 1 ms a prompt token, 2 where 500 are before it.
SPEED = Speed(step=0.01, token=1e-3, square=1e-6, answer=1e-3, prompts=ENOUGH, answers=ENOUGH)


def test_prompts_leave_answers_the_time_that_they_asked_for() -> None:
    """Where 90 ms are planned: 78 ms beside two answers, which are 72 tokens at the start of a prompt."""
    answers = [Work(1, False, 100, 0.09 / SHARE), Work(1, False, 50, 0.3)]
    assert plan_step([*answers, Work(300, True)], 512, SPEED) == [1, 1, 72]
    assert plan_step([*answers, Work(300, True, before=500)], 512, SPEED) == [1, 1, 38]
    assert plan_step([*answers, Work(40, True), Work(300, True), Work(9, True)], 512, SPEED) == [1, 1, 40, 35, 0]
    assert plan_step([*answers, Work(300, True)], 30, SPEED) == [1, 1, 28]


def test_nobody_s_target_bounds_nothing() -> None:
    prompt = Work(300, True, target=0.02)  # it has no answer yet that could be held up
    assert plan_step([Work(1, False, 100), prompt], 512, SPEED) == [1, 300]
    assert plan_step([prompt], 512, SPEED) == [300]
    asked = [Work(1, False, 100, 0.1), prompt]
    assert plan_step(asked, 512) == plan_step(asked, 512, Speed()) == [1, 300]


def test_who_joins_in_the_midst_of_a_step_keeps_its_target_too() -> None:
    """It waits out the step, and sits in the next: where 180 ms would be planned, each takes 90."""
    target = 0.18 / SHARE
    answers, prompt = [Work(1, False, 100, target), Work(1, False, 50, 0.3)], Work(300, True)
    assert plan_step([*answers, prompt], 512, SPEED) == [1, 1, 146]
    assert plan_step([*answers, prompt], 512, SPEED, joining=target) == [1, 1, 72]
    assert plan_step([*answers, prompt], 512, SPEED, joining=1.0) == [1, 1, 146]
    assert plan_step([prompt], 512, SPEED, joining=target) == [74]  # nobody is there yet


def test_the_shortest_target_of_those_who_join_counts_as_long_as_more_may_follow() -> None:
    joining = Joining()
    assert joining.next() is None
    joining.announce(0.05)
    joining.announce(None)  # takes nothing from the others
    joining.announce(0.2)
    assert joining.next() == 0.05
    for _ in range(JOINED - 2):
        joining.next()
    joining.announce(0.3)
    assert [joining.next() for _ in range(2)] == [0.05, 0.3]
    assert [joining.next() for _ in range(JOINED - 1)][-2:] == [0.3, None]


def test_prompts_go_on_where_answers_are_late_already() -> None:
    """The first one, by as many as are worth a step."""
    answers = [Work(1, False, 100, 0.012)] * 9
    assert plan_step([*answers, Work(300, True), Work(300, True)], 512, SPEED) == [1] * 9 + [LEAST, 0]
    assert plan_step([*answers, Work(7, True), Work(300, True)], 512, SPEED) == [1] * 9 + [7, 0]


@given(WORK, st.integers(1, 600), st.floats(1e-3, 10.0), st.integers(0, 10_000))
def test_a_planned_step_keeps_the_target_or_is_the_least(
    work: list[Work], budget: int, target: float, before: int
) -> None:
    work = [item._replace(before=before, target=None if item.prefill else target) for item in work]
    counts = plan_step(work, budget, SPEED)
    prompts = [count for count, item in zip(counts, work, strict=True) if item.prefill]
    answers = len(work) - len(prompts)
    seconds = SPEED.decode_seconds(answers, 0)
    seconds += sum(SPEED.token * count + SPEED.square * ((before + count) ** 2 - before**2) for count in prompts)
    if answers and seconds > SHARE * target + 1e-9:
        assert sum(prompts) <= LEAST
    if prompts:
        first = next(item for item in work if item.prefill)
        assert prompts[0] >= min(first.pending, LEAST, max(1, budget - answers))


def test_lowest_priority_then_youngest_is_preempted() -> None:
    assert choose_victim([Claim(0, 1), Claim(0, 3), Claim(0, 2)]) == 1
    assert choose_victim([Claim(0, 1), Claim(5, 9), Claim(0, 0)]) == 0
    assert choose_victim([Claim(1, 1), Claim(-1, 0)]) == 1
