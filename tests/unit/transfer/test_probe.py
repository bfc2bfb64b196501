"""What a probe sends, and what it makes of the times."""

from __future__ import annotations

import pytest

from pdserve.transfer.probe import PATIENCE, ROUND_TRIPS, SMALL, WARM_UP, Probe, default_sizes


def test_round_trips_one_by_one_then_each_size_at_full_speed() -> None:
    """A peer that takes 2 ms for a small frame and 10 ms for each that counts gives just those figures."""
    found: list[tuple[float, list[tuple[int, float]]]] = []
    probe = Probe([1000, 5000], 4000, lambda *result: found.append(result), 0.0)
    now = 0.0
    for _ in range(ROUND_TRIPS):
        assert probe.next_size() == SMALL
        probe.sent(now)
        assert probe.next_size() == 0, "one at a time"
        now += 0.002
        probe.landed(now)
    for size, count in ((1000, 4), (5000, 2)):
        for _ in range(WARM_UP + count):
            assert probe.next_size() == size
            probe.sent(now)
        assert probe.next_size() == 0, "all sent, not all landed"
        for _ in range(WARM_UP + count):
            now += 0.01
            probe.landed(now)
    assert probe.over and probe.next_size() == 0
    [(round_trip, samples)] = found
    assert round_trip == pytest.approx(0.002)
    assert [size for size, _ in samples] == [1000, 5000]
    assert samples[0][1] == pytest.approx(1000 / 0.01)
    # Of two parts the slower one counts: of its first frame those that went before had to land first.
    assert samples[1][1] == pytest.approx(5000 / (0.01 * (WARM_UP + 1)))


@pytest.mark.parametrize("held_up", range(12))
def test_a_stop_in_the_middle_is_not_the_link(held_up: int) -> None:
    """Frames of 10 ms, and one of 5 s: either process was stopped, or had its core taken. A link is measured once, and
    would be avoided as long as it stands."""
    found: list[tuple[float, list[tuple[int, float]]]] = []
    probe = Probe([1000], 12_000, lambda *result: found.append(result), 0.0)
    for _ in range(ROUND_TRIPS):
        probe.sent(0.0)
        probe.landed(0.0)
    now = 0.0
    for _ in range(WARM_UP + 12):
        probe.sent(now)
    for number in range(-WARM_UP, 12):
        now += 5.0 if number == held_up else 0.01
        probe.landed(now)
    [(_, [(_, rate)])] = found
    assert rate == pytest.approx(1000 / 0.01, rel=0.4)


def test_sizes_end_with_the_largest() -> None:
    """Powers of two below it, each once."""
    assert default_sizes(1 << 18) == [1 << 16, 1 << 17, 1 << 18]
    assert default_sizes(100_000) == [1 << 16, 100_000]
    assert default_sizes(1000) == [1000]


def test_a_slow_link_tells_what_it_could() -> None:
    """What takes too long is left out; credits that come late change nothing."""
    found: list[tuple[float, list[tuple[int, float]]]] = []
    probe = Probe([1000], 1 << 40, lambda *result: found.append(result), 0.0)
    for _ in range(ROUND_TRIPS):
        probe.sent(0.0)
        probe.landed(1.0)
    probe.sent(2.0)
    probe.sent(3.0)
    probe.landed(PATIENCE)
    assert probe.over and found == [(1.0, [])]
    probe.landed(PATIENCE + 1)
    assert len(found) == 1
