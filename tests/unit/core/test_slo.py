"""A request met its targets or missed them by its own tokens' times; what its client did wrong says nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.slo import Outcome, SloTargets, Verdict, judge, percentile

TARGETS = SloTargets(ttft=0.5, itl=0.05, itl_percentile=99.0)
GOOD, SLOW = [0.04] * 200, [0.04] * 197 + [1.0] * 3  # three stalls in 200 gaps are more than one percent


@pytest.mark.parametrize(
    ("ttft", "gaps", "verdict"),
    [
        (0.5, GOOD, Verdict.MET),
        (0.51, GOOD, Verdict.MISSED_TTFT),
        (0.5, SLOW, Verdict.MISSED_ITL),
        (0.51, SLOW, Verdict.MISSED_BOTH),
        (0.5, [], Verdict.MET),
        (0.1, [0.04] * 198 + [1.0] * 2, Verdict.MET),
        (0.1, [0.04, 0.06], Verdict.MISSED_ITL),
    ],
)
def test_an_answer_is_judged_by_its_first_token_and_its_gaps(ttft: float, gaps: list[float], verdict: Verdict) -> None:
    assert judge(Outcome.ANSWERED, 20.0, ttft, gaps, TARGETS) is verdict


def test_a_mean_would_hide_the_stall() -> None:
    assert sum(SLOW) / len(SLOW) < 0.06 and judge(Outcome.ANSWERED, 9.0, 0.1, SLOW, TARGETS) is Verdict.MISSED_ITL


def test_the_percentile_decides_how_many_stalls_are_forgiven() -> None:
    assert judge(Outcome.ANSWERED, 9.0, 0.1, SLOW, SloTargets(0.5, 0.05, 98.0)) is Verdict.MET
    assert judge(Outcome.ANSWERED, 9.0, 0.1, [*GOOD, 0.06], SloTargets(0.5, 0.05, 100.0)) is Verdict.MISSED_ITL


def test_a_failure_counts_and_an_error_of_the_client_does_not() -> None:
    assert judge(Outcome.FAILED, 0.1, None, [], TARGETS) is Verdict.FAILED
    assert judge(Outcome.FAILED, 9.0, 0.1, GOOD, TARGETS) is Verdict.FAILED
    assert judge(Outcome.REFUSED, 9.0, None, [], TARGETS) is None


def test_who_gave_up_waiting_has_been_missed_and_who_changed_their_mind_has_not() -> None:
    """Else a slow deployment would look good by those who did not wait for it."""
    for outcome in (Outcome.CANCELLED, Outcome.EXPIRED):
        assert judge(outcome, 0.4, None, [], TARGETS) is None
        assert judge(outcome, 0.6, None, [], TARGETS) is Verdict.MISSED_TTFT
        assert judge(outcome, 8.42, 0.4, GOOD, TARGETS, open_gap=0.02) is None
        assert judge(outcome, 9.0, 0.4, SLOW, TARGETS) is Verdict.MISSED_ITL


def test_a_stall_that_nobody_waited_for_the_end_of_is_a_gap() -> None:
    """One token, and then nothing: there is no closed gap to judge by."""
    for outcome in (Outcome.CANCELLED, Outcome.EXPIRED):
        assert judge(outcome, 30.0, 0.1, [], TARGETS, open_gap=29.9) is Verdict.MISSED_ITL
        assert judge(outcome, 30.0, 0.6, [], TARGETS, open_gap=29.4) is Verdict.MISSED_BOTH
        assert judge(outcome, 30.0, 0.1, [0.04] * 98, TARGETS, open_gap=25.0) is Verdict.MISSED_ITL
        assert judge(outcome, 30.0, 0.1, GOOD, TARGETS, open_gap=21.9) is None, "one in 201, as in an answer"
        assert judge(outcome, 0.14, 0.1, [], TARGETS, open_gap=0.04) is None
    assert judge(Outcome.ANSWERED, 30.0, 0.1, [], TARGETS, open_gap=29.9) is Verdict.MET


def test_an_open_gap_that_is_short_yet_does_not_water_down_the_others() -> None:
    gaps = [0.04] * 98 + [1.0]
    assert judge(Outcome.CANCELLED, 6.0, 0.1, gaps, TARGETS, open_gap=0.0) is Verdict.MISSED_ITL
    assert judge(Outcome.CANCELLED, 6.0, 0.1, gaps, TARGETS, open_gap=0.01) is Verdict.MISSED_ITL


@pytest.mark.parametrize("broken", [(0, 1, 99), (1, -1, 99), (1, 1, 0), (1, 1, 101), (float("inf"), 1, 99)])
def test_targets_that_cannot_be_meant_are_refused(broken: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="targets must be above 0"):
        SloTargets(*broken)


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, percent) for percent in (1, 50, 99, 99.1, 100)] == [1, 50, 99, 100, 100]
    assert percentile([7.0], 0.001) == 7.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.001, 100))
def test_a_percentile_has_its_share_at_or_below_it(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= percent / 100 * len(values) - 1e-6
    assert sum(value < found for value in values) < percent / 100 * len(values) + 1e-6
