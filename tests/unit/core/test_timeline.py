"""Whatever the stamps are, the stages cut the same time into parts that sum, and never overlap."""

from __future__ import annotations

from dataclasses import astuple

from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.timeline import Stages, Stamps

ms = 1_000_000


def test_a_hand_off_has_every_stage() -> None:
    """Reserved after 5 ms, while the prompt was being computed since 7: what reserving cost is 5."""
    stamps = Stamps(
        arrived=100 * ms,
        dispatched=120 * ms,
        reserved=125 * ms,
        computing=30 * ms,
        first=157 * ms,
        ready=160 * ms,
        stepping=8 * ms,
        second=170 * ms,
    )
    assert stamps.stages() == Stages(20 * ms, 5 * ms, 32 * ms, 3 * ms, 2 * ms, 8 * ms)
    assert stamps.stages().time_to_first_token == 57 * ms and stamps.stages().first_gap == 13 * ms


def test_what_computing_hid_is_in_no_stage() -> None:
    """The reservation came long after computing began, and the KV had landed before the first token was known."""
    stamps = Stamps(arrived=10, dispatched=20, reserved=90, computing=70, first=100, ready=95, stepping=30, second=140)
    assert stamps.stages() == Stages(queue=10, reserve=10, prefill=70, decode_wait=10, first_step=30)


def test_one_token_has_no_second_half() -> None:
    stages = Stamps(arrived=10, dispatched=20, first=100, ready=150).stages()
    assert stages == Stages(queue=10, prefill=80) and stages.first_gap == 0


def test_what_was_not_told_falls_to_the_stage_around_it() -> None:
    assert Stamps(arrived=1, dispatched=2, first=10, second=15).stages() == Stages(1, 0, 8, 0, 5, 0)


def test_a_request_that_only_waited_has_only_that() -> None:
    assert Stamps(arrived=10).stages() == Stages()
    assert Stamps(arrived=10, dispatched=30).stages() == Stages(queue=20)


@given(*[st.integers(0, 1000)] * 8)
def test_the_sums_are_exact_in_any_order_of_stamps(
    arrived: int, dispatched: int, reserved: int, computing: int, first: int, ready: int, stepping: int, second: int
) -> None:
    """Clocks of two machines and events that overtake one another may tell anything but when tokens came."""
    first, second = (arrived + first if first else 0), (arrived + first + second if second else 0)
    stages = Stamps(arrived, dispatched, reserved, computing, first, ready, stepping, second).stages()
    assert all(part >= 0 for part in astuple(stages))
    if first:
        assert stages.time_to_first_token == first - arrived
        assert stages.first_gap == (second - first if second else 0)
