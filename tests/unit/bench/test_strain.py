"""A client that could not keep up is found out."""

from __future__ import annotations

import asyncio
import time

import pytest

from pdserve.bench.strain import Strain, refusal, watch
from pdserve.core.quantiles import quantiles_of
from pdserve.core.slo import SloTargets

TARGETS = SloTargets(ttft=0.5, itl=0.05, itl_percentile=99.0)


def strain(late_ms: float = 1.0, lag_ms: float = 1.0, cpu: float = 0.1, seconds: float = 9.0) -> Strain:
    return Strain(quantiles_of([late_ms / 1e3]), quantiles_of([lag_ms / 1e3]), cpu, seconds)


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (strain(), None),
        (strain(late_ms=25.0, lag_ms=12.5, cpu=0.9), None),  # the bounds themselves
        (strain(late_ms=26.0), "26.0 ms late, more than 5% of 500 ms TTFT"),
        (strain(lag_ms=13.0), "lag was 13.0 ms, more than 25% of 50 ms ITL"),
        (strain(cpu=0.95), "95% of a core"),
        (strain(cpu=0.95, seconds=0.9), None),  # too short to tell
    ],
)
def test_the_rule(seen: Strain, said: str | None) -> None:
    reason = refusal(seen, TARGETS)
    assert reason is None if said is None else reason is not None and said in reason


def test_all_reasons_are_told() -> None:
    reason = refusal(strain(late_ms=100.0, lag_ms=100.0, cpu=1.0), TARGETS)
    assert reason is not None and reason.startswith("the client was the bottleneck: ") and reason.count(";") == 2


def test_one_late_send_in_a_hundred_is_not_the_rule() -> None:
    """It is p99 that counts; the worst is told beside it."""
    seen = Strain(quantiles_of([0.001] * 199 + [9.0]), quantiles_of([]), 0.0, 9.0)
    assert refusal(seen, TARGETS) is None and seen.as_dict()["lateness_max_ms"] == 9000.0


async def test_a_busy_event_loop_shows() -> None:
    """Its lag is at least what it computed for without a break, and so is the CPU time."""
    async with watch() as pulse:
        await asyncio.sleep(0)  # the watch begins
        until = time.process_time() + 0.1
        while time.process_time() < until:
            pass
        await asyncio.sleep(0.02)  # the watch's own timer is due before this one
    seen = pulse.strain([0.25])
    assert seen.lag.greatest > 0.08 and pulse.cpu_seconds >= 0.1
    assert seen.cpu > 0 and seen.lateness.greatest == 0.25
