"""A call's tries, on a clock of the test's own."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from pdserve.client import DEFAULT_RETRIES, NO_RETRIES, Client, Retry, RetryPolicy, SyncClient
from pdserve.client.attempts import Attempts, CallSettings
from pdserve.client.targets import Rotation, Turn
from pdserve.core.errors import NoCapacity, Unavailable
from pdserve.rpc.errors import to_status

ONE = Rotation(["the router"])


class Refused(grpc.RpcError):
    """What grpc raises for a server that is not there."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "connection refused"

    def trailing_metadata(self) -> tuple[()]:
        return ()


class Full(grpc.RpcError):
    """What grpc raises where the fleet is full; `seconds` until one should come back."""

    def __init__(self, seconds: float | None) -> None:
        self._status: Any = rpc_status.to_status(to_status(NoCapacity("full", seconds)))

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.RESOURCE_EXHAUSTED

    def details(self) -> str:
        return "full"

    def trailing_metadata(self) -> Any:
        return self._status.trailing_metadata


def test_the_time_left_is_counted_from_the_first_try() -> None:
    attempts = Attempts(CallSettings(None, DEFAULT_RETRIES, None, False), "Generate", 10.0, 100.0, ONE)
    assert [attempts.remaining(now) for now in (100.0, 104.0, 110.0, 111.0)] == [10.0, 6.0, 0.0, 0.0]


@pytest.mark.parametrize("timeout", [None, math.inf])
def test_without_a_deadline_nothing_is_left_out_of(timeout: float | None) -> None:
    attempts = Attempts(CallSettings(None, DEFAULT_RETRIES, None, False), "Generate", timeout, 100.0, ONE)
    assert attempts.remaining(1e9) is None


def test_a_retry_is_told_before_its_wait_and_the_last_failure_is_raised() -> None:
    told: list[Retry] = []
    attempts = Attempts(CallSettings(None, DEFAULT_RETRIES, told.append, False), "Generate", None, 0.0, ONE)
    delays = [attempts.failed(Refused(), now=1.0), attempts.failed(Refused(), now=2.0)]
    assert [(retry.number, retry.delay) for retry in told] == [(1, delays[0]), (2, delays[1])]
    assert all(isinstance(retry.error, Unavailable) for retry in told)
    with pytest.raises(Unavailable, match="connection refused") as caught:
        attempts.failed(Refused(), now=3.0)
    assert isinstance(caught.value.__cause__, Refused) and len(told) == 2


def test_what_must_not_be_repeated_is_raised_at_once() -> None:
    attempts = Attempts(CallSettings(None, DEFAULT_RETRIES, None, False), "Generate", None, 0.0, ONE)
    with pytest.raises(Unavailable):
        attempts.failed(Refused(), now=0.0, again=False)
    with pytest.raises(Unavailable):
        Attempts(CallSettings(None, NO_RETRIES, None, False), "Generate", None, 0.0, ONE).failed(Refused(), now=0.0)


def test_retries_are_counted_from_the_latest_progress() -> None:
    attempts = Attempts(CallSettings(None, RetryPolicy(1), None, False), "Generate", None, 0.0, ONE)
    for progress in (0, 1, 5):
        attempts.failed(Refused(), now=0.0, progress=progress)
    with pytest.raises(Unavailable):
        attempts.failed(Refused(), now=0.0, progress=5)


def test_every_target_is_asked_before_there_is_a_wait() -> None:
    """However few retries there are; these are waits."""
    attempts = Attempts(
        CallSettings(None, RetryPolicy(1, 60.0, 60.0), None, False), "Generate", None, 0.0, Rotation("abc")
    )
    delays = [attempts.failed(Refused(), now=0.0) for _ in range(3)]
    assert delays[:2] == [0.0, 0.0] and delays[2] > 0.0 and attempts.target == "a"
    assert attempts.failed(Refused(), now=0.0, progress=1) == 0.0
    with pytest.raises(Unavailable):
        Attempts(CallSettings(None, NO_RETRIES, None, False), "Generate", None, 0.0, Rotation("abc")).failed(
            Refused(), now=0.0
        )


def test_one_that_is_full_is_passed_over_and_the_last_one_is_waited_for() -> None:
    """As long as it said itself. What it calls too large it would call that elsewhere."""
    attempts = Attempts(CallSettings(None, DEFAULT_RETRIES, None, False), "Generate", None, 0.0, Rotation("ab"))
    assert (attempts.failed(Full(3.0), now=0.0), attempts.target) == (0.0, "b")
    assert (attempts.failed(Full(5.0), now=0.0), attempts.target) == (5.0, "b")
    too_large = Attempts(CallSettings(None, DEFAULT_RETRIES, None, False), "Generate", None, 0.0, Rotation("ab"))
    with pytest.raises(NoCapacity):
        too_large.failed(Full(None), now=0.0)


def test_a_call_goes_through_all_and_calls_to_come_begin_with_the_next_one() -> None:
    rotation = Rotation(["a", "b", "c"])
    one, other = Turn(rotation), Turn(rotation)
    one.move(lost=True)
    other.move(lost=True)  # the same one, at the same time
    assert (one.current, other.current, Turn(rotation).current) == ("b", "b", "b")
    one.move(lost=False)
    assert (one.current, Turn(rotation).current) == ("c", "b")
    one.move(lost=True)
    assert (one.current, Turn(rotation).current) == ("a", "b"), "nobody begins with c anyway"


@pytest.mark.parametrize("kind", [Client, SyncClient])
def test_several_cannot_be_waited_for(kind: type[Client] | type[SyncClient]) -> None:
    with pytest.raises(ValueError, match="waits for one router"):
        kind(["127.0.0.1:1", "127.0.0.1:2"], wait_for_ready=True)
    with pytest.raises(ValueError, match="at least one"):
        kind([])
