"""The figures of the last minute, by a clock that the test turns."""

from __future__ import annotations

import pytest

from pdserve.core.slo import Outcome, Verdict
from pdserve.router.meter import Ended
from pdserve.router.stats import RecentStats
from pdserve.v1 import inference_pb2


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def ended(outcome: Outcome = Outcome.ANSWERED, verdict: Verdict | None = Verdict.MET, cached: int = 0) -> Ended:
    usage = inference_pb2.Usage(prompt_tokens=100, completion_tokens=3, cached_tokens=cached, replays=1)
    return Ended("tiny", outcome, "OK", 1.0, 0.1, usage, verdict)


def test_a_minute_of_requests_comes_to_its_rates_and_percentiles() -> None:
    clock = Clock()
    stats = RecentStats(clock)
    for number in range(10):
        stats.started("tiny")
        stats.queued("tiny", 0.002)
        stats.first_token("tiny", 0.1 + 0.1 * (number == 9))
        for gap in (0.02, 0.04):
            stats.gap("tiny", gap)
        verdict = Verdict.MET if number < 8 else Verdict.MISSED_TTFT
        stats.ended(ended(verdict=verdict, cached=50))
        clock.now += 1.0
    told = stats.told("tiny", waiting=2)
    assert (told.running, told.waiting, told.completed, told.good, told.failed, told.cancelled) == (0, 2, 10, 8, 0, 0)
    assert (told.ttft.count, told.itl.count, told.queue.count) == (10, 20, 10)
    assert told.ttft.p50_ms == pytest.approx(100, rel=0.02) and told.ttft.max_ms == pytest.approx(200)
    assert (told.itl.p50_ms, told.itl.p99_ms) == (pytest.approx(20, rel=0.02), pytest.approx(40, rel=0.02))
    assert told.requests_per_second == pytest.approx(1.0)
    assert told.output_tokens_per_second == pytest.approx(3.0)
    assert told.prompt_tokens_per_second == pytest.approx(100.0)
    assert told.goodput == pytest.approx(0.8)
    assert (told.cache_hit_rate, told.replays) == (0.5, 10)


def test_what_runs_is_now_and_all_else_passes() -> None:
    clock = Clock()
    stats = RecentStats(clock)
    stats.started("tiny")
    stats.started("tiny")
    stats.ended(ended(Outcome.FAILED, Verdict.FAILED))
    assert (stats.told("tiny", 0).running, stats.told("tiny", 0).failed) == (1, 1)
    clock.now += 61.0
    told = stats.told("tiny", 0)
    assert (told.running, told.failed, told.requests_per_second, told.ttft.count) == (1, 0, 0.0, 0)


def test_failures_and_cancels_do_not_count_as_prompts_that_were_answered() -> None:
    stats = RecentStats(Clock())
    for outcome in Outcome:
        stats.started("tiny")
        stats.ended(ended(outcome, None, cached=100 if outcome is Outcome.ANSWERED else 0))
    told = stats.told("tiny", 0)
    assert (told.completed, told.failed, told.cancelled, told.good) == (1, 3, 1, 0)
    assert told.cache_hit_rate == 1.0


def test_rates_say_what_they_count() -> None:
    """Requests and prompts of answers; tokens as they came, whatever became of their answers."""
    clock = Clock()
    stats = RecentStats(clock)
    for outcome in Outcome:
        stats.started("tiny")
        stats.first_token("tiny", 0.1)
        stats.gap("tiny", 0.02)
        stats.ended(ended(outcome, None))
    clock.now += 10.0
    told = stats.told("tiny", 0)
    assert told.requests_per_second == pytest.approx(0.1) == told.completed / 10
    assert told.output_tokens_per_second == pytest.approx(2 * len(Outcome) / 10)
    assert told.prompt_tokens_per_second == pytest.approx(10.0)


def test_models_are_apart_and_a_new_one_is_empty() -> None:
    stats = RecentStats(Clock())
    stats.first_token("one", 0.5)
    assert stats.told("one", 0).ttft.count == 1
    other = stats.told("two", 0)
    assert (other.model, other.ttft.count, other.cache_hit_rate) == ("two", 0, 0.0)
