"""Predictions are stretched until most come true, and only where others had a part in them."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.policy.admission import admit
from pdserve.policy.margin import MOST, QUANTILE, Margin, Margins
from tests.unit.policy.test_admission import IDLE, NOBODY, request, waiting

ALONE = 0.1
TIMES = st.floats(0.0, 100.0)


def taught(wrong_by: float, count: int = 2000) -> Margin:
    """A margin whose predictions of waiting were all too short by that factor, give or take a fifth."""
    margin, chance = Margin(), random.Random(1)
    for _ in range(count):
        wait = chance.uniform(0.1, 1.0)
        margin.observe(ALONE, ALONE + wait, ALONE + wait * wrong_by * chance.uniform(0.8, 1.2))
    return margin


@pytest.mark.parametrize("wrong_by", [1.2, 1.5, 2.0, 4.0])
def test_most_predictions_come_true_once_stretched(wrong_by: float) -> None:
    margin, chance = taught(wrong_by), random.Random(2)
    assert wrong_by < margin.factor < 1.4 * wrong_by
    waits = [chance.uniform(0.1, 1.0) for _ in range(1000)]
    kept = [wait * wrong_by * chance.uniform(0.8, 1.2) <= margin.factor * wait for wait in waits]
    assert QUANTILE - 0.12 < sum(kept) / len(kept) <= 1.0


def test_what_comes_true_needs_no_margin_and_one_that_is_not_needed_any_more_goes() -> None:
    assert taught(0.5).factor == 1.0
    margin = taught(4.0)
    for _ in range(1000):
        margin.observe(ALONE, ALONE + 0.5, ALONE + 0.5)
    assert margin.factor < 1.1


def test_it_rises_within_a_dozen_late_ones() -> None:
    assert taught(4.0, 12).factor > 2.0


@given(st.lists(st.tuples(TIMES, TIMES, TIMES)))
def test_it_is_bounded_and_leaves_alone_what_others_had_no_part_in(seen: list[tuple[float, float, float]]) -> None:
    margin = Margin()
    for alone, others, actual in seen:
        margin.observe(alone, alone + others, actual)
        assert 1.0 <= margin.factor <= MOST
        assert margin.stretched(alone, alone) == alone
        assert margin.stretched(alone, alone + others) >= alone + others


def test_nothing_is_learned_from_a_request_that_hardly_waited() -> None:
    margin = Margin()
    for _ in range(100):
        margin.observe(1.0, 1.01, 50.0)
    assert margin.factor == 1.0


def test_the_door_lets_in_fewer_where_waiting_takes_longer_than_predicted() -> None:
    """400 ms of waiting and 100 of computing for a target of 600; then the margin says that waiting takes twice that.
    With nobody ahead there is nothing to wait for."""
    asked, margins = request(ttft=0.6), Margins(ttft=Margin(2.0))
    assert admit(IDLE, asked, waiting(400)).admitted
    refused = admit(IDLE, asked, waiting(400), margins=margins)
    assert not refused.admitted and "it would come in 902 ms" in refused.reason
    assert math.isclose(refused.retry_after, 0.302, abs_tol=1e-9)
    assert admit(IDLE, asked, waiting(200), margins=margins).admitted
    assert admit(IDLE, request(ttft=0.11), NOBODY, margins=Margins(Margin(MOST), Margin(MOST))).admitted


def test_gaps_have_a_margin_of_their_own() -> None:
    asked, crowd = request(itl=0.05), waiting(10, 20)
    assert admit(IDLE, asked, crowd).admitted
    assert not admit(IDLE, asked, crowd, margins=Margins(gap=Margin(4.0))).admitted


def test_gaps_that_were_promised_say_nothing_of_the_load() -> None:
    """Prompts fill steps up to the target: what stays within it came true, however little was predicted."""
    let_in, margins = admit(IDLE, request(itl=0.05), waiting(10, 20)), Margins(gap=Margin(2.0))
    assert let_in.gap is not None and let_in.joined_gap < 0.045
    let_in.observe_gap(margins, 0.05, 0.05)
    assert margins.gap.factor < 2.0
    let_in.observe_gap(margins, 0.5, 0.05)
    assert margins.gap.factor > 2.0


def test_what_was_predicted_is_told_without_its_margin() -> None:
    """Else a margin would be measured against itself."""
    plain = admit(IDLE, request(ttft=0.6), waiting(200))
    careful = admit(IDLE, request(ttft=0.6), waiting(200), margins=Margins(ttft=Margin(1.5)))
    assert (careful.ttft, careful.idle_ttft) == (plain.ttft, plain.idle_ttft)
    margins = Margins()
    assert plain.ttft is not None
    plain.observe(margins, 2 * plain.ttft)
    plain.observe_gap(margins, 0.0, 1.0)
    assert margins.ttft.factor > 1.0 and margins.gap.factor == 1.0
