"""One step's tokens, and who gives way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.policy.batching import Claim, Work, choose_victim, plan_step

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


def test_lowest_priority_then_youngest_is_preempted() -> None:
    assert choose_victim([Claim(0, 1), Claim(0, 3), Claim(0, 2)]) == 1
    assert choose_victim([Claim(0, 1), Claim(5, 9), Claim(0, 0)]) == 0
    assert choose_victim([Claim(1, 1), Claim(-1, 0)]) == 1
