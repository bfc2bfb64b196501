"""How much longer a prompt takes beside answers that keep their targets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.layout import KVLayout
from pdserve.core.slo import SloTargets
from pdserve.policy.batching import JOINING, LEAST, SHARE
from pdserve.policy.estimate import Speed
from pdserve.policy.fleet import PlacementRequest, Role, Target, WorkerView
from pdserve.policy.predict import stretch

LAYOUT = KVLayout(16, 2, 2, 16, "float32", bytes(16))
WORKER = WorkerView("d0", Role.DECODE, LAYOUT, 8, 512, 100, 100, sequences=2, bounded=2)
ANSWERS = Speed(step=0.01)  # 10 ms a step, however many there are


def asks(itl: float) -> PlacementRequest:
    return PlacementRequest(64, 100, targets=SloTargets(1.0, itl, 99.0), stated=frozenset({Target.ITL}))


def test_a_prompt_takes_what_answers_leave_of_each_step() -> None:
    step = SHARE * JOINING * 0.1
    assert stretch(WORKER, asks(0.1), ANSWERS, Speed(token=1e-4)) == pytest.approx(step / (step - 0.01))


def test_a_prompt_goes_on_by_the_least_chunk_as_long_as_nobody_feels_that() -> None:
    least = LEAST * 1e-3
    assert stretch(WORKER, asks(0.06), ANSWERS, Speed(token=1e-3)) == pytest.approx((0.01 + least) / least)
    assert stretch(WORKER, asks(0.05), ANSWERS, Speed(token=1e-3)) is None


def test_nobody_who_asked_for_nothing_is_made_to_wait() -> None:
    assert stretch(replace(WORKER, sequences=3), asks(1.0), ANSWERS, Speed(token=1e-3)) is None
    assert stretch(WORKER, replace(asks(1.0), stated=frozenset()), ANSWERS, Speed(token=1e-3)) is None
    assert stretch(replace(WORKER, sequences=0, bounded=0), asks(1e-6), ANSWERS, Speed(token=1e-3)) == 1.0


@given(st.floats(1e-6, 10.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_any_speed_gives_a_time_or_none(itl: float, gap: float, token: float) -> None:
    """Those too that were not measured, or cost nothing."""
    longer = stretch(WORKER, asks(itl), Speed(step=gap), Speed(token=token))
    assert longer is None or longer >= 1.0
