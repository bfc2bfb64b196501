"""Who leaves a decode worker that is going to stop, and to whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.policy.draining import STAY_SHARE, Leave, decide_leaving
from pdserve.policy.routing import Kind, choose_decode
from tests.unit.policy.test_routing import LAYOUT, request, view, worker


@pytest.mark.parametrize(
    "rule, remaining, gap, leaves",
    [
        (Leave.NEEDED, 100, 0.1, False),  # 10 s of 30
        (Leave.NEEDED, 149, 0.1, False),
        (Leave.NEEDED, 151, 0.1, True),
        (Leave.NEEDED, 1000, 0.1, True),
        (Leave.NEEDED, 1, 0.0, True),  # nobody knows how long that takes
        (Leave.ALL, 1, 0.001, True),
        (Leave.OFF, 100_000, 1.0, False),
    ],
)
def test_whoever_might_not_be_through_in_time_leaves(rule: Leave, remaining: int, gap: float, leaves: bool) -> None:
    decision = decide_leaving(rule, remaining, gap, grace=30.0)
    assert decision.leaves is leaves and decision.reason


def test_less_time_lets_more_leave() -> None:
    """And with none left, whatever is not over leaves."""
    seconds = 100 * 0.05
    assert not decide_leaving(Leave.NEEDED, 100, 0.05, grace=1.01 * seconds / STAY_SHARE).leaves
    assert decide_leaving(Leave.NEEDED, 100, 0.05, grace=0.99 * seconds / STAY_SHARE).leaves
    assert decide_leaving(Leave.NEEDED, 1, 0.05, grace=0.0).leaves


def test_another_decode_worker_goes_on_with_it() -> None:
    """The one that is left least to do, as for any answer; never the one that it leaves."""
    fleet = view(worker("p0"), worker("d0"), worker("d1", outstanding_tokens=500), worker("d2"))
    decision = choose_decode(fleet, request(), "d0")
    assert (decision.kind, decision.prefill, decision.decode) == (Kind.REMOTE, None, "d2")
    assert "d0" in decision.reason
    assert choose_decode(fleet, request(excluded=frozenset({"d2"})), "d0").decode == "d1"


@pytest.mark.parametrize(
    "others, reason",
    [
        ([], "no decode worker is up"),
        ([worker("p0")], "no decode worker is up"),
        ([worker("d1", draining=True)], "no decode worker is up"),
        ([worker("d1", layout=replace(LAYOUT, num_layers=3))], "no decode worker is up"),
        ([worker("d1", available_blocks=2)], "no decode worker has room"),
    ],
)
def test_where_nobody_can_it_waits_and_holds_nobody_up(others: list[object], reason: str) -> None:
    decision = choose_decode(view(worker("d0"), *others), request(), "d0")  # type: ignore[arg-type]
    assert decision.kind is Kind.WAIT and decision.lets_pass
    assert reason in decision.reason


def test_it_waits_where_its_own_worker_is_unknown() -> None:
    decision = choose_decode(view(worker("d1")), request(), "d0")
    assert decision.kind is Kind.WAIT and decision.lets_pass and "is gone" in decision.reason
