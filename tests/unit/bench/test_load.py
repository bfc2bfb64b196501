"""Loads are what was asked for: lengths, shares, pace; and what contradicts itself is refused."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from pathlib import Path

import pytest

from pdserve.bench.load import Load, fitting, parse_mix
from pdserve.core.errors import ConfigError
from pdserve.simulator.workload import Arrival

MIX = ((0.8, 128, 64), (0.2, 2048, 16))


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.5, 0.5), (3.0, 3.0)])
def test_arrivals_follow_the_law(burstiness: float, variation: float) -> None:
    """Of a Poisson process the gaps' deviation is their mean; of a Gamma process `burstiness` times that."""
    made = Load(requests=20_000, rate=8.0, mix=MIX, burstiness=burstiness).arrivals(seed=3)
    gaps = [later.at - earlier.at for earlier, later in itertools.pairwise(made)]
    mean, deviation = statistics.mean(gaps), statistics.stdev(gaps)
    assert mean == pytest.approx(1 / 8, rel=0.08)
    assert deviation / mean == pytest.approx(variation, rel=0.08)


def test_poisson_counts_have_their_mean_as_variance() -> None:
    """How many arrive in a second is spread as the law says, not only how far apart neighbours are."""
    made = Load(requests=40_000, rate=10.0, mix=MIX).arrivals(seed=1)
    counts = Counter(int(one.at) for one in made)
    seconds = [counts[second] for second in range(int(made[-1].at))]
    assert statistics.mean(seconds) == pytest.approx(10, rel=0.05)
    assert statistics.variance(seconds) == pytest.approx(10, rel=0.1)


def test_a_mix_has_its_shares_and_exact_lengths() -> None:
    made = Load(requests=10_000, rate=1.0, mix=MIX).arrivals(seed=1)
    found = Counter((one.prompt, one.output) for one in made)
    assert set(found) == {(128, 64), (2048, 16)}
    assert found[2048, 16] / len(made) == pytest.approx(0.2, rel=0.05)


def test_a_rate_moves_arrivals_and_changes_nothing_else() -> None:
    """Twice the rate: each request at half its time, of the same lengths."""
    load = Load(requests=50, rate=1.0, mix=MIX)
    slow, fast = load.arrivals(seed=5), load.at_rate(2.0).arrivals(seed=5)
    assert [one.at / 2 for one in slow] == pytest.approx([one.at for one in fast])
    assert [(one.prompt, one.output) for one in slow] == [(one.prompt, one.output) for one in fast]


def test_a_trace_is_replayed_with_its_times_scaled(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n5,100,7\n6,200,8\n9,300,9\n")
    made = Load(trace=trace, rate=4.0).arrivals(seed=0)
    assert [(one.at, one.prompt, one.output) for one in made] == [(0.0, 100, 7), (0.25, 200, 8), (1.0, 300, 9)]
    assert len(Load(trace=trace, rate=4.0, requests=2).arrivals(seed=0)) == 2


def test_a_mix_is_read() -> None:
    assert parse_mix("80% 128/64 + 20% 2048/16") == MIX
    assert parse_mix("100%9/1") == ((1.0, 9, 1),)


@pytest.mark.parametrize(
    ("text", "said"),
    [("80% 128/64", "100%"), ("80 128/64", "such as"), ("50% 1/1 + 50% 1", "such as"), ("", "such as")],
)
def test_what_is_no_mix(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_mix(text)


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (Load(rate=1.0), "say what to send"),
        (Load(rate=1.0, mix=MIX, trace=Path("a.csv")), "say what to send"),
        (Load(mix=MIX), "say how fast"),
        (Load(rate=1.0, streams=2, mix=MIX), "closed loop"),
        (Load(rate=1.0, trace=Path("a.csv"), turns=2), "a trace has its own"),
        (Load(rate=-1.0, mix=MIX), "above 0"),
        (Load(rate=1.0, mix=MIX, burstiness=0.0), "burstiness: must be above 0"),
        (Load(rate=1.0, mix=((1.0, 0, 4),)), "prompt: must be above 0"),
    ],
)
def test_what_cannot_be_is_refused(load: Load, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load.arrivals(seed=0)


def test_what_has_no_room() -> None:
    """A prompt and its answer share the context window."""
    short, long = Arrival(0, 10, 6), Arrival(0, 10, 7)
    assert fitting([short, long], 16) == [short]
    assert fitting([short, long], None) == [short, long]
