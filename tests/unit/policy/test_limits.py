"""A tenant gets what it may have, no more, and is told exactly when to come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.policy.limits import Allowance, Limit, Limits, Refusal, Whose


class Counted:
    """Limits of which every account may have the same."""

    def __init__(self, allowance: Allowance, **options: int) -> None:
        self.limits, self.allowance = Limits(**options), allowance

    def enter(self, name: str, now: float) -> Refusal | None:
        return self.limits.enter(name, self.allowance, now)

    def spend(self, name: str, tokens: int, now: float) -> Refusal | None:
        return self.limits.spend(name, self.allowance, tokens, now)

    def settle(self, name: str, taken: int, used: int, now: float) -> None:
        self.limits.settle(name, self.allowance, taken, used, now)

    def leave(self, name: str, seconds: float | None) -> None:
        self.limits.leave(name, seconds)

    def __len__(self) -> int:
        return len(self.limits)


def refused(answer: Refusal | None) -> Refusal:
    assert answer is not None
    return answer


def test_so_many_requests_at_a_time_for_each_tenant() -> None:
    limits = Counted(Allowance(max_requests=2))
    assert limits.enter("a", 0.0) is None and limits.enter("a", 0.0) is None
    answer = refused(limits.enter("a", 0.0))
    assert (answer.limit, answer.reason) == (Limit.REQUESTS, "the tenant has 2 requests here already")
    assert limits.enter("b", 0.0) is None
    limits.leave("a", 1.0)
    assert limits.enter("a", 1.0) is None


def test_a_refused_request_does_not_count() -> None:
    limits = Counted(Allowance(max_requests=1))
    assert limits.enter("a", 0.0) is None
    for _ in range(5):
        refused(limits.enter("a", 0.0))
    limits.leave("a", 1.0)
    assert limits.enter("a", 1.0) is None


def test_the_wait_for_a_request_to_end_is_learned() -> None:
    limits = Counted(Allowance(max_requests=4))
    for _ in range(4):
        limits.enter("a", 0.0)
    assert refused(limits.enter("a", 0.0)).retry_after == 1.0  # none has ended yet
    limits.leave("a", 8.0)
    limits.enter("a", 8.0)
    assert refused(limits.enter("a", 8.0)).retry_after == 2.0  # four end in the eight seconds that each takes
    limits.leave("a", 18.0)
    limits.enter("a", 18.0)
    assert refused(limits.enter("a", 18.0)).retry_after == 2.5


def test_a_request_that_was_refused_says_nothing_of_how_long_they_take() -> None:
    limits = Counted(Allowance(max_requests=1))
    limits.enter("a", 0.0)
    limits.leave("a", 8.0)
    for _ in range(50):
        limits.enter("a", 8.0)
        limits.leave("a", None)
    limits.enter("a", 8.0)
    assert refused(limits.enter("a", 8.0)).retry_after == 8.0


@pytest.mark.parametrize("seconds, told", [(0.001, 0.1), (4000.0, 30.0)])
def test_the_wait_for_a_request_to_end_is_bounded(seconds: float, told: float) -> None:
    limits = Counted(Allowance(max_requests=1))
    limits.enter("a", 0.0)
    limits.leave("a", seconds)
    limits.enter("a", seconds)
    assert refused(limits.enter("a", seconds)).retry_after == told


def test_a_minute_s_tokens_and_when_there_are_more() -> None:
    limits = Counted(Allowance(tokens_per_minute=600))
    limits.enter("a", 0.0)
    assert limits.spend("a", 500, 0.0) is None
    answer = refused(limits.spend("a", 250, 0.0))
    assert (answer.limit, answer.retry_after) == (Limit.TOKENS, 15.0)  # 150 are missing, and 10 a second come
    assert answer.reason == "250 tokens are more than is left of the tenant's 600 a minute"
    refused(limits.spend("a", 250, 14.9))
    assert limits.spend("a", 250, 15.0) is None
    limits.enter("b", 15.0)
    assert limits.spend("b", 600, 15.0) is None


def test_what_was_not_used_is_given_back_and_what_was_used_beyond_is_owed() -> None:
    limits = Counted(Allowance(tokens_per_minute=600))
    limits.enter("a", 0.0)
    limits.spend("a", 600, 0.0)
    limits.settle("a", 600, 100, 0.0)
    assert limits.spend("a", 500, 0.0) is None
    limits.settle("a", 500, 800, 0.0)
    assert refused(limits.spend("a", 100, 0.0)).retry_after == pytest.approx(40.0)
    limits.settle("a", 10_000, 0, 0.0)  # never more than a minute's worth
    assert limits.spend("a", 600, 0.0) is None
    refused(limits.spend("a", 1, 0.0))


def test_one_larger_than_the_bucket_is_let_in_when_it_is_full_and_leaves_a_debt() -> None:
    limits = Counted(Allowance(tokens_per_minute=600))
    limits.enter("a", 0.0)
    assert limits.spend("a", 1800, 0.0) is None
    assert refused(limits.spend("a", 1800, 0.0)).retry_after == pytest.approx(180.0)
    refused(limits.spend("a", 1800, 179.0))
    assert limits.spend("a", 1800, 180.0) is None


def test_without_limits_everything_is_let_in() -> None:
    limits = Counted(Allowance())
    for _ in range(1000):
        assert limits.enter("a", 0.0) is None and limits.spend("a", 1 << 40, 0.0) is None
        limits.settle("a", 1 << 40, 0, 0.0)


def test_tenants_without_requests_are_remembered_up_to_a_bound() -> None:
    limits = Counted(Allowance(tokens_per_minute=600), remembered=3)
    limits.enter("busy", 0.0)
    limits.spend("busy", 600, 0.0)
    for number in range(10):
        limits.enter(f"tenant{number}", 0.0)
        limits.spend(f"tenant{number}", 600, 0.0)
        limits.leave(f"tenant{number}", 1.0)
    assert len(limits) == 4
    refused(limits.spend("busy", 1, 0.0))
    limits.enter("tenant9", 0.0)
    refused(limits.spend("tenant9", 1, 0.0))
    limits.enter("tenant0", 0.0)
    assert limits.spend("tenant0", 600, 0.0) is None


def test_a_key_s_limit_says_that_it_is_the_key_s() -> None:
    limits, key = Limits(), Allowance(1, 600, Whose.KEY)
    assert limits.enter("a", key, 0.0) is None
    answer = refused(limits.enter("a", key, 0.0))
    assert (answer.limit, answer.reason) == (Limit.KEY_REQUESTS, "the key has 1 requests here already")
    answer = refused(limits.spend("a", key, 10, 0.0)) if limits.spend("a", key, 600, 0.0) is None else answer
    assert (answer.limit, answer.reason) == (
        Limit.KEY_TOKENS,
        "10 tokens are more than is left of the key's 600 a minute",
    )


def test_what_an_account_may_have_may_become_another() -> None:
    """A limit that comes begins with a full bucket; one that goes down holds at once, what is owed included."""
    limits = Limits()
    assert limits.enter("a", Allowance(), 0.0) is None
    limits.settle("a", Allowance(), 0, 1 << 40, 0.0)
    assert limits.spend("a", Allowance(None, 600), 600, 0.0) is None
    refused(limits.spend("a", Allowance(None, 600), 1, 0.0))
    assert refused(limits.spend("a", Allowance(None, 60), 10, 0.0)).retry_after == pytest.approx(10.0)
    assert limits.spend("a", Allowance(), 1 << 40, 0.0) is None
    refused(limits.enter("a", Allowance(1), 0.0))


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 2000), st.integers(0, 2000)), max_size=30),
)
def test_over_any_time_no_more_is_used_than_the_rate_and_one_bucket(
    per_minute: int, moves: list[tuple[float, int, int]]
) -> None:
    """Where answers are as long as was said, or shorter; and who waits as told is let in at once."""
    limits = Counted(Allowance(tokens_per_minute=per_minute))
    limits.enter("a", 0.0)
    now, spent, largest = 0.0, 0, 0
    for passed, tokens, used in moves:
        now += passed
        answer = limits.spend("a", tokens, now)
        if answer is not None:
            assert answer.retry_after > 0
            now += answer.retry_after
            assert limits.spend("a", tokens, now) is None
        used = min(used, tokens)
        limits.settle("a", tokens, used, now)
        spent, largest = spent + used, max(largest, tokens)
        assert spent <= per_minute + now * per_minute / 60 + max(0, largest - per_minute) + 1e-3
