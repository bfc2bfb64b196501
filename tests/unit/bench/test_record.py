"""What is counted as a wait and as a gap, and what as an error."""

from __future__ import annotations

import pytest

from pdserve.bench.record import Told
from pdserve.core.slo import SloTargets, Verdict
from tests.unit.bench.samples import record

TARGETS = SloTargets(ttft=1.0, itl=0.5, itl_percentile=50.0)


def test_tokens_of_one_message_share_its_time() -> None:
    """A message of three tokens is the gap before it and two of nothing."""
    seen = record((1.5, 1), (2.0, 3), (2.25, 1), at=1.0)
    assert (seen.ttft, seen.gaps, seen.tokens) == (0.5, [0.5, 0.0, 0.0, 0.25], 5)
    assert seen.tpot == pytest.approx(0.75 / 4) and seen.e2e == 1.25
    assert record((1.5, 2)).gaps == [0.0]


def test_a_message_without_tokens_is_none() -> None:
    seen = record((1.0, 1), (2.0, 0), (3.0, 1))
    assert seen.gaps == [2.0]


def test_the_clock_starts_when_it_was_to_be_sent() -> None:
    """A late send counts against the answer."""
    seen = record((1.5, 1), at=1.0)
    seen.sent = 1.4
    assert (seen.ttft, seen.lateness) == (0.5, pytest.approx(0.4))


def test_nothing_came() -> None:
    seen = record(at=2.0, ended=5.0, error="UNAVAILABLE: gone")
    assert (seen.ttft, seen.tpot, seen.gaps, seen.e2e) == (None, None, [], 3.0)
    assert seen.verdict(TARGETS) is Verdict.FAILED


@pytest.mark.parametrize(
    ("stamps", "verdict"),
    [
        (((1.0, 1), (1.5, 1)), Verdict.MET),
        (((1.1, 1), (1.2, 1)), Verdict.MISSED_TTFT),
        (((1.0, 1), (1.6, 1)), Verdict.MISSED_ITL),
        (((1.0, 1), (1.6, 1), (1.7, 1)), Verdict.MET),  # the median of its gaps keeps it
        (((1.1, 1), (1.7, 1)), Verdict.MISSED_BOTH),
        (((0.2, 1),), Verdict.MET),
    ],
)
def test_verdicts(stamps: tuple[tuple[float, int], ...], verdict: Verdict) -> None:
    assert record(*stamps).verdict(TARGETS) is verdict


@pytest.mark.parametrize(
    ("told", "output", "error"),
    [
        (Told(10, 2), 2, None),
        (None, 2, None),
        (Told(10, 3), 3, None),  # a chunk held more than was known
        (Told(10, 2), 3, "10 prompt and 2 answer tokens, where 10 and 3"),
        (Told(11, 2), 2, "11 prompt and 2 answer tokens, where 10 and 2"),
        (None, 3, "2 answer tokens"),
    ],
)
def test_lengths_must_be_exact(told: Told | None, output: int, error: str | None) -> None:
    seen = record((1.0, 1), (2.0, 1), output=output, told=told)
    seen.check()
    assert (seen.error is None) if error is None else (error in (seen.error or ""))


def test_an_error_stays_the_first_one() -> None:
    seen = record((1.0, 1), output=9, error="UNAVAILABLE: gone")
    seen.check()
    assert seen.error == "UNAVAILABLE: gone"
