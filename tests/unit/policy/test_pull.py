"""KV is pulled where that is predicted to be clearly faster than computing it."""

from __future__ import annotations

import pytest

from pdserve.policy.pull import PATIENCE_MAX, PATIENCE_MIN, choose_pull

MEGABYTE = 1_000_000


@pytest.mark.parametrize(
    ("tokens", "rate", "speed", "pulls"),
    [
        (1000, 1e9, 1000, True),  # 20 ms against 1 s
        (1000, 1e7, 1000, False),  # 2 s against 1 s
        (1000, 2.6e7, 1000, True),  # 770 ms against 1 s
        (1000, 2.4e7, 1000, False),  # 835 ms: not by enough
        (1, 1e9, 1000, False),  # two round trips outweigh a token
        (0, 1e9, 1000, False),
        (-16, 1e9, 1000, False),
        (1000, 0, 1000, False),  # unknown: computing measures
        (1000, 1e9, 0, False),
    ],
)
def test_pulls_what_is_faster(tokens: int, rate: float, speed: float, pulls: bool) -> None:
    """20 KB a token, 1 ms a round trip."""
    decision = choose_pull(
        tokens=tokens, size=20_000 * tokens, bytes_per_second=rate, round_trip=0.001, tokens_per_second=speed
    )
    assert decision.pull is pulls and decision.reason


@pytest.mark.parametrize(("tokens", "patience"), [(20, PATIENCE_MIN), (1000, 2.0), (100_000, PATIENCE_MAX)])
def test_waits_twice_as_long_as_computing_would_take(tokens: int, patience: float) -> None:
    """Within bounds: neither shorter than a busy peer's step, nor long enough to be felt as a hang."""
    decision = choose_pull(tokens=tokens, size=1000, bytes_per_second=1e9, round_trip=0.001, tokens_per_second=1000)
    assert decision.patience == pytest.approx(patience)
