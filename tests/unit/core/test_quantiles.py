"""Percentiles in bounded memory: close to the exact ones, and only of what is recent."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdserve.core.quantiles import Histogram, Quantiles, Window, quantiles_of


@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=200))
@example([1.0] * 8 + [6046.0, 6173.0])  # the last two share a bucket
def test_a_histogram_is_within_its_bucket_of_the_exact_quantiles(values: list[float]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    told, exact = histogram.quantiles(), quantiles_of(values)
    assert (told.count, told.greatest) == (exact.count, exact.greatest)
    assert told.mean == pytest.approx(exact.mean)
    for name in ("p50", "p90", "p99"):
        assert getattr(told, name) == pytest.approx(getattr(exact, name), rel=0.021)


def test_exact_quantiles_are_nearest_ranks() -> None:
    found = quantiles_of([float(value) for value in range(100, 0, -1)])
    assert (found.p50, found.p90, found.p99, found.greatest, found.mean) == (50.0, 90.0, 99.0, 100.0, 50.5)
    assert quantiles_of([]) == Histogram().quantiles() == Quantiles()


def test_zeros_are_values_too() -> None:
    histogram = Histogram()
    histogram.add(0.0)
    assert histogram.quantiles() == Quantiles(count=1, mean=0.0, p50=0.0, p90=0.0, p99=0.0, greatest=0.0)


def test_a_window_forgets_what_is_older_than_it() -> None:
    window = Window(began=100.0, seconds=60.0, parts=12)
    window.add(101.0, 1.0)
    window.add(130.0, 2.0)
    assert window.merged(131.0).count == 2
    assert window.merged(159.9).total == 3.0
    late = window.merged(165.0)  # 101 is 64 seconds ago
    assert (late.count, late.greatest) == (1, 2.0)
    assert window.merged(1000.0).count == 0


@given(st.lists(st.floats(0.0, 30.0), max_size=50))
def test_a_window_holds_all_of_the_last_seconds_but_one_part_and_nothing_older(steps: list[float]) -> None:
    """The oldest part goes as a whole: up to a twelfth of the window may be missing at its far end."""
    now, times, window = 0.0, [], Window(began=0.0, seconds=60.0, parts=12)
    for step in steps:
        now += step
        times.append(now)
        window.add(now, now)
    kept = window.merged(now).count
    assert sum(time > now - 55.0 for time in times) <= kept <= sum(time > now - 60.0 for time in times)


def test_rates_count_on_the_time_that_the_window_can_have_values_of() -> None:
    window = Window(began=100.0, seconds=60.0, parts=12)
    assert window.covered(110.0) == pytest.approx(10.0)  # it is young
    assert 55.0 <= window.covered(1000.0) <= 60.0
    assert window.covered(100.0) > 0.0


def test_merging_leaves_the_parts_as_they_are() -> None:
    window = Window(began=0.0)
    window.add(1.0, 5.0)
    window.merged(2.0).add(7.0)
    assert window.merged(2.0).count == 1
