"""The search finds the rate at which a promise breaks, within its precision, and always ends."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.bench.rates import RateSearch
from pdserve.core.errors import ConfigError


def search(limit: float, first: float, precision: float = 0.05, most_runs: int = 100) -> tuple[RateSearch, list[float]]:
    """Of a target that keeps its promise up to `limit`, with the rates that were tried."""
    found, tried = RateSearch(first, precision, most_runs), list[float]()
    while (rate := found.next()) is not None:
        tried.append(rate)
        found.take(rate, rate <= limit)
    return found, tried


def test_doubling_then_halving() -> None:
    found, tried = search(limit=5.0, first=1.0, precision=0.1)
    assert tried == [1.0, 2.0, 4.0, 8.0, 6.0, 5.0, 5.5]
    assert (found.passed, found.failed, found.exact) == (5.0, 5.5, True)


def test_a_beginning_above_the_limit_goes_down() -> None:
    found, tried = search(limit=1.0, first=8.0, precision=0.5)
    assert tried == [8.0, 4.0, 2.0, 1.0, 1.5]
    assert (found.passed, found.failed) == (1.0, 1.5)


@given(
    limit=st.floats(0.01, 1e4), first=st.floats(0.01, 1e4), precision=st.sampled_from([0.5, 0.1, 0.01]),
)  # fmt: skip
def test_the_limit_is_within_the_precision(limit: float, first: float, precision: float) -> None:
    found, tried = search(limit, first, precision)
    assert found.exact and found.passed is not None and found.failed is not None
    assert found.passed <= limit < found.failed <= found.passed * (1 + precision) * (1 + 1e-6)
    assert len(tried) == len(set(tried)) < 40


@given(seed=st.integers(0, 1000))
def test_noise_never_keeps_it_from_ending(seed: int) -> None:
    """However verdicts fall, each run lies between what passed and what failed."""
    chance, found, runs = random.Random(seed), RateSearch(1.0, 0.01, 30), 0
    while (rate := found.next()) is not None:
        assert (found.passed or 0.0) < rate and (found.failed is None or rate < found.failed)
        found.take(rate, chance.random() < 0.5)
        runs += 1
    assert runs <= 30


@pytest.mark.parametrize(("limit", "passed"), [(1e9, 16.0), (0.0, None)])
def test_it_ends_without_an_answer(limit: float, passed: float | None) -> None:
    """Where every run passes or every run fails, after the last one; what is known then is a bound."""
    found, tried = search(limit, first=1.0, most_runs=5)
    assert len(tried) == 5 and not found.exact and found.passed == passed


@pytest.mark.parametrize(("first", "precision", "runs"), [(0.0, 0.1, 5), (1.0, 0.0, 5), (1.0, 1.0, 5), (1.0, 0.1, 0)])
def test_what_is_no_search(first: float, precision: float, runs: int) -> None:
    with pytest.raises(ConfigError):
        RateSearch(first, precision, runs)
