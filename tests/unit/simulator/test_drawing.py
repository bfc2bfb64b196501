"""What plots show is what happened: curves, populations and shares from literals, and from a simulation that ran."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.simulator.costs import Fitted
from pdserve.simulator.drawing import STAGES, Distribution, Drawing, cdf, population, shares_over_time
from pdserve.simulator.plan import FleetPlan
from pdserve.simulator.report import Report
from pdserve.simulator.simulation import Simulation
from tests.unit.simulator.small_fleet import LAYOUT, TARGETS, small_drawing


def test_a_distribution_counts_every_value_as_often_as_it_occurs() -> None:
    found = Distribution.of([(3.0, 1), (1.0, 6), (2.0, 3)], target=2.0)
    assert found.curve == [(1.0, 0.0), (1.0, 0.6), (2.0, 0.9), (3.0, 1.0)]
    assert found.percentiles == (1.0, 2.0, 3.0) and found.within == 0.9
    assert Distribution.of([], 1.0) == Distribution([], (), 0.0)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 1000)), min_size=1), st.integers(1, 50))
def test_a_curve_rises_to_1_and_is_short(weighted: list[tuple[float, int]], points: int) -> None:
    """However many values there are, and it never tells of more than there were."""
    curve = cdf(weighted, points)
    total = sum(count for _, count in weighted)
    assert curve == sorted(curve) and curve[-1] == (max(weighted)[0], 1.0)
    assert len(curve) <= points + 2
    for value, share in curve[1:]:
        assert share <= sum(count for other, count in weighted if other <= value) / total + 1e-9


def test_a_population_is_who_came_and_did_not_go() -> None:
    stays = [(0.0, 2.0), (1.0, 3.0), (1.0, 1.0)]
    assert population(stays, [0.0, 0.5, 1.0, 2.0, 3.0]) == [1, 1, 2, 1, 0]


def test_shares_over_time() -> None:
    """By the window that an event is in; the last moment belongs to the last one."""
    events = [(0.0, True), (1.0, False), (9.0, True), (10.0, True)]
    assert shares_over_time(events, 10.0, 5) == [(1.0, 0.5), (3.0, None), (5.0, None), (7.0, None), (9.0, 1.0)]
    assert shares_over_time([], 0.0, 5) == []


def test_a_drawing_of_a_simulation() -> None:
    """Latencies, stages and busy shares are those of the run."""
    drawing = small_drawing()
    assert drawing.ttft.percentiles == pytest.approx((0.1, 0.15, 0.15), abs=1e-3)
    assert drawing.itl.percentiles[0] == pytest.approx(0.01) and drawing.itl.within == 1.0
    assert [share for _, share in drawing.attainment if share is not None] == [1.0, 1.0]
    end = drawing.times[-1]
    assert end == pytest.approx(0.3, abs=0.01)
    counts = dict(zip(drawing.times, zip(*drawing.in_flight, strict=True), strict=True))
    assert len(drawing.in_flight) == len(STAGES)
    assert counts[0.0] == (0, 1, 0) and sum(counts[end]) == 0
    assert max(map(sum, counts.values())) == 2
    assert list(drawing.busy) == ["prefill", "decode", "links"]
    assert drawing.busy["prefill"] == pytest.approx([0.2 / end])
    assert all(0 < share < 1 for shares in drawing.busy.values() for share in shares)


def test_nothing_happened() -> None:
    """A run without requests has no curves, and no division by nothing."""
    simulation = Simulation(FleetPlan(LAYOUT, Fitted((1, 0, 0), (1, 0, 0)), colocated=1))
    simulation.run([])
    empty = Drawing.of("none", simulation, Report.of(simulation, TARGETS), TARGETS)
    assert (empty.ttft.curve, empty.attainment, empty.busy) == ([], [], {})
