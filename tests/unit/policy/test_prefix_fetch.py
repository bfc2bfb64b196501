"""Blocks are fetched where that beats computing, or where nobody knows yet."""

from __future__ import annotations

import pytest

from pdserve.policy.prefix_fetch import Rate, should_fetch


@pytest.mark.parametrize(
    ("fetch_rate", "compute_rate", "fetch"),
    [(None, None, True), (None, 1e9, True), (1.0, None, True), (1e6, 1e3, True), (1e6, 1e5, False)],
)
def test_what_is_known_decides(fetch_rate: float | None, compute_rate: float | None, fetch: bool) -> None:
    decision = should_fetch(tokens=160, size=100_000, fetch_rate=fetch_rate, compute_rate=compute_rate)
    assert decision.fetch is fetch and decision.reason


def test_an_equal_time_is_no_gain() -> None:
    assert not should_fetch(tokens=100, size=100, fetch_rate=1.0, compute_rate=1.0).fetch
    assert not should_fetch(tokens=0, size=0, fetch_rate=None, compute_rate=None).fetch


def test_a_rate_follows_measurements_and_forgets_old_ones() -> None:
    rate = Rate(max_age=10)
    assert rate.value(0) is None
    rate.update(100, 1, now=0)
    assert rate.value(1) == 100
    rate.update(200, 1, now=1)
    assert rate.value(1) == pytest.approx(130)
    assert rate.value(12) is None
    rate.update(50, 1, now=12)
    assert rate.value(12) == 50
    rate.update(0, 1, now=13)
    rate.update(1, 0, now=13)
    assert rate.value(13) == 50
