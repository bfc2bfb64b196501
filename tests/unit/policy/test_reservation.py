"""What admission takes, and what it leaves."""

from __future__ import annotations

import pytest

from pdserve.policy.reservation import fits, reserved_tokens


@pytest.mark.parametrize(
    ("given", "remaining", "lookahead", "tokens"), [(10, 100, 64, 74), (10, 5, 64, 15), (10, 0, 64, 10), (10, 5, 0, 10)]
)
def test_room_for_an_answers_beginning_but_not_beyond_its_end(
    given: int, remaining: int, lookahead: int, tokens: int
) -> None:
    assert reserved_tokens(given, remaining, lookahead) == tokens


def test_a_lone_sequence_may_take_all_and_beside_others_a_watermark_stays() -> None:
    assert fits(5, 5, 2, others=False)
    assert not fits(5, 6, 2, others=True)
    assert fits(5, 7, 2, others=True)
