"""A call's tries, on a clock of the test's own."""

from __future__ import annotations

import math

import grpc
import pytest

from pdserve.client import DEFAULT_RETRIES, NO_RETRIES, Retry, RetryPolicy
from pdserve.client.attempts import Attempts, CallSettings
from pdserve.core.errors import Unavailable


class Refused(grpc.RpcError):
    """What grpc raises for a server that is not there."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "connection refused"

    def trailing_metadata(self) -> tuple[()]:
        return ()


def test_the_time_left_is_counted_from_the_first_try() -> None:
    attempts = Attempts(CallSettings(None, DEFAULT_RETRIES, None, False), "Generate", 10.0, now=100.0)
    assert [attempts.remaining(now) for now in (100.0, 104.0, 110.0, 111.0)] == [10.0, 6.0, 0.0, 0.0]


@pytest.mark.parametrize("timeout", [None, math.inf])
def test_without_a_deadline_nothing_is_left_out_of(timeout: float | None) -> None:
    attempts = Attempts(CallSettings(None, DEFAULT_RETRIES, None, False), "Generate", timeout, now=100.0)
    assert attempts.remaining(1e9) is None


def test_a_retry_is_told_before_its_wait_and_the_last_failure_is_raised() -> None:
    told: list[Retry] = []
    attempts = Attempts(CallSettings(None, DEFAULT_RETRIES, told.append, False), "Generate", None, now=0.0)
    delays = [attempts.failed(Refused(), now=1.0), attempts.failed(Refused(), now=2.0)]
    assert [(retry.number, retry.delay) for retry in told] == [(1, delays[0]), (2, delays[1])]
    assert all(isinstance(retry.error, Unavailable) for retry in told)
    with pytest.raises(Unavailable, match="connection refused") as caught:
        attempts.failed(Refused(), now=3.0)
    assert isinstance(caught.value.__cause__, Refused) and len(told) == 2


def test_what_must_not_be_repeated_is_raised_at_once() -> None:
    attempts = Attempts(CallSettings(None, DEFAULT_RETRIES, None, False), "Generate", None, now=0.0)
    with pytest.raises(Unavailable):
        attempts.failed(Refused(), now=0.0, again=False)
    with pytest.raises(Unavailable):
        Attempts(CallSettings(None, NO_RETRIES, None, False), "Generate", None, now=0.0).failed(Refused(), now=0.0)


def test_retries_are_counted_from_the_latest_progress() -> None:
    attempts = Attempts(CallSettings(None, RetryPolicy(1), None, False), "Generate", None, now=0.0)
    for progress in (0, 1, 5):
        attempts.failed(Refused(), now=0.0, progress=progress)
    with pytest.raises(Unavailable):
        attempts.failed(Refused(), now=0.0, progress=5)


def test_every_target_is_asked_before_there_is_a_wait() -> None:
    policy = RetryPolicy(4, 60.0, 60.0)
    attempts = Attempts(CallSettings(None, policy, None, False), "Generate", None, now=0.0, targets=3)
    delays = [attempts.failed(Refused(), now=0.0) for _ in range(3)]
    assert delays[:2] == [0.0, 0.0] and delays[2] > 0.0
    assert attempts.failed(Refused(), now=0.0, progress=1) == 0.0
