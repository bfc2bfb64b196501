"""When a failed call is made again: the decision, from values alone."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.client import DEFAULT_RETRIES, NO_RETRIES, RetryPolicy
from pdserve.client.retry import retry_delay
from pdserve.core.errors import IntegrityError, InvalidRequest, NoCapacity, PdserveError, Unavailable, UnknownModel
from pdserve.rpc.errors import DeadlineExceeded, RpcError

seconds = st.floats(0.0, 1e6)
chances = st.floats(0.0, 1.0, exclude_max=True)
policies = st.builds(
    lambda retries, first, factor: RetryPolicy(retries, first, first * factor),
    st.integers(0, 2000),
    st.floats(1e-3, 60.0),
    st.floats(1.0, 1e3),
)
worth_it = st.one_of(
    st.just(Unavailable("gone")),
    seconds.map(lambda after: NoCapacity("full", after)),
    seconds.map(lambda after: Unavailable("no worker", after)),
)
FINAL = [
    InvalidRequest("text", "empty"),
    UnknownModel("no model 'x'"),
    NoCapacity("message larger than max"),
    DeadlineExceeded("late"),
    RpcError(grpc.StatusCode.INTERNAL, "bug"),
    RpcError(grpc.StatusCode.CANCELLED, "cancelled"),
    IntegrityError("books"),
]


@given(policies, worth_it, st.integers(0, 2000), seconds, chances)
def test_no_wait_outlasts_the_deadline(
    policy: RetryPolicy, error: PdserveError, retries: int, remaining: float, chance: float
) -> None:
    delay = retry_delay(policy, error, retries, remaining, chance)
    assert delay is None or 0.0 <= delay < remaining


@given(policies, seconds, st.integers(0, 2000), st.none() | seconds, chances)
def test_a_time_that_the_server_names_is_kept_to_the_letter(
    policy: RetryPolicy, after: float, retries: int, remaining: float | None, chance: float
) -> None:
    """Neither earlier nor later, whatever the policy's own backoff is; or not at all, where the deadline is sooner."""
    allowed = retries < policy.max_retries and (remaining is None or after < remaining)
    for error in (NoCapacity("full", after), Unavailable("no worker", after)):
        assert retry_delay(policy, error, retries, remaining, chance) == (after if allowed else None)


@given(policies, st.integers(0, 2000), chances)
def test_backoff_is_drawn_below_a_bound_that_doubles(policy: RetryPolicy, retries: int, chance: float) -> None:
    delay = retry_delay(policy, Unavailable("gone"), retries, None, chance)
    if retries >= policy.max_retries:
        assert delay is None
        return
    assert delay is not None and 0.0 <= delay <= policy.max_backoff
    if retries < 20:
        assert delay <= policy.initial_backoff * 2.0**retries
    bound = retry_delay(policy, Unavailable("gone"), retries, None, 1.0 - 2**-53)
    assert bound is not None and delay == pytest.approx(chance * bound)


def test_the_bounds_of_the_default_policy() -> None:
    policy = RetryPolicy(max_retries=9)
    bounds = [retry_delay(policy, Unavailable("gone"), retries, None, 1.0) for retries in range(9)]
    assert bounds == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0]
    assert retry_delay(DEFAULT_RETRIES, Unavailable("gone"), 2, None, 0.0) is None


@pytest.mark.parametrize("error", FINAL, ids=lambda error: type(error).__name__)
def test_what_would_fail_again_is_not_retried(error: PdserveError) -> None:
    assert retry_delay(DEFAULT_RETRIES, error, 0, None, 0.5) is None


def test_no_retries_are_none() -> None:
    assert retry_delay(NO_RETRIES, Unavailable("gone"), 0, None, 0.0) is None
    assert retry_delay(NO_RETRIES, NoCapacity("full", 0.0), 0, None, 0.0) is None


@pytest.mark.parametrize(
    "wrong", [{"max_retries": -1}, {"initial_backoff": 0.0}, {"initial_backoff": 9.0}, {"max_backoff": float("nan")}]
)
def test_policies_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RetryPolicy(**wrong)  # type: ignore[arg-type]
