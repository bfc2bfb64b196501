"""Traces are read as they were published, and synthetic streams are what their parameters say."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import Counter
from pathlib import Path

import pytest
from pydantic import ValidationError

from pdserve.core.errors import ConfigError
from pdserve.simulator.parts import KindPart, SyntheticPart
from pdserve.simulator.request import block_hashes
from pdserve.simulator.workload import Arrival, Kind, Lengths, Synthetic, read_trace, repeat, scale


def test_mooncake_trace(tmp_path: Path) -> None:
    """Milliseconds become seconds from the first request on, and ids stay as they are."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 27000, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n'
        '{"timestamp": 3000, "input_length": 10, "output_length": 0, "hash_ids": [46]}\n'
    )
    assert read_trace(trace) == [Arrival(0.0, 10, 1, (46,)), Arrival(24.0, 6955, 52, (46, 47))]


def test_azure_trace(tmp_path: Path) -> None:
    """Timestamps with seven digits are read to the last one."""
    trace = tmp_path / "azure.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,110,27\n"
    )
    first, second = read_trace(trace)
    assert (first.at, first.prompt, first.output) == (0.0, 4808, 10)
    assert second.at == pytest.approx(0.052)


def test_vidur_trace(tmp_path: Path) -> None:
    """Columns are found by name; others are nobody's business."""
    trace = tmp_path / "vidur.csv"
    trace.write_text(",arrived_at,num_prefill_tokens,num_decode_tokens\n0,5.5,374,44\n1,6.0,396,109\n")
    assert read_trace(trace) == [Arrival(0.0, 374, 44), Arrival(0.5, 396, 109)]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"timestamp": 1}\n', "line 1"),
        ("a.csv", "when,what\n1,2\n", "columns"),
        ("a.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n0,x,1\n", "line 2"),
        ("a.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n", "no requests"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    """The file, and where there is one the line, is named."""
    trace = tmp_path / name
    trace.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_trace(trace)
    assert str(trace) in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    """A path that leads nowhere is an error of the user's."""
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "none.jsonl")


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    """Mean and coefficient of variation of the time between arrivals are those asked for."""
    made = Synthetic(5.0, Lengths(100), Lengths(10), burstiness=burstiness).arrivals(20_000, seed=1)
    gaps = [later.at - earlier.at for earlier, later in itertools.pairwise(made)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.1)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(burstiness, rel=0.1)


def test_lengths_have_mean_and_spread() -> None:
    """A log-normal length has the mean and the coefficient of variation asked for."""
    rng, lengths = random.Random(1), Lengths(500, cv=0.8)
    drawn = [lengths.draw(rng) for _ in range(20_000)]
    assert statistics.mean(drawn) == pytest.approx(500, rel=0.03)
    assert statistics.stdev(drawn) / statistics.mean(drawn) == pytest.approx(0.8, rel=0.05)


def test_others_have_their_share() -> None:
    """A turn is of one kind or another, each with its own lengths; without others a seed gives what it gave."""
    others = (Kind(0.25, Lengths(900), Lengths(3)), Kind(0.05, Lengths(5000), Lengths(1)))
    made = Synthetic(1.0, Lengths(100), Lengths(10), others=others).arrivals(20_000, seed=1)
    found = Counter((arrival.prompt, arrival.output) for arrival in made)
    assert set(found) == {(100, 10), (900, 3), (5000, 1)}
    assert found[900, 3] / len(made) == pytest.approx(0.25, rel=0.05)
    assert found[5000, 1] / len(made) == pytest.approx(0.05, rel=0.1)
    with pytest.raises(ValidationError, match="must leave some"):
        SyntheticPart(rate=1, prompt=1, output=1, others=[KindPart(share=0.5, prompt=1, output=1)] * 2)


def test_same_seed_same_requests() -> None:
    """A stream is a function of its parameters and the seed."""
    stream = Synthetic(2.0, Lengths(50, 1.0), Lengths(20, 1.0), turns=3, system=64)
    assert stream.arrivals(100, seed=7) == stream.arrivals(100, seed=7)
    assert stream.arrivals(100, seed=7) != stream.arrivals(100, seed=8)


def test_turns_extend_their_conversation() -> None:
    """A later turn's prompt begins with all of the earlier one, and everybody shares the system prompt."""
    made = Synthetic(1.0, Lengths(40), Lengths(16), turns=3, system=64, think=1.0).arrivals(60, seed=3)
    by_session: dict[int | None, list[Arrival]] = {}
    for arrival in made:
        by_session.setdefault(arrival.session, []).append(arrival)
        assert arrival.block_ids[:4] == (0, 1, 2, 3)
    several = [turns for turns in by_session.values() if len(turns) > 1]
    assert several
    for turns in several:
        for earlier, later in itertools.pairwise(turns):
            assert later.at > earlier.at
            assert later.prompt == earlier.prompt + 16 + 40
            assert later.block_ids[: len(earlier.block_ids)] == earlier.block_ids
    first_ids = {turns[0].block_ids[4:] for turns in by_session.values()}
    assert len(first_ids) == len(by_session)


def test_scale_and_repeat() -> None:
    """A faster trace keeps its order; copies share nothing with one another."""
    trace = [Arrival(0.0, 512, 1, (1,)), Arrival(4.0, 1024, 1, (1, 2))]
    assert [arrival.at for arrival in scale(trace, 2.0)] == [0.0, 2.0]
    assert scale(trace, 1.0, limit=1) == trace[:1]
    copies = repeat(trace, 2)
    assert [arrival.at for arrival in copies] == [0.0, 0.0, 4.0, 4.0]
    assert not {*copies[0].block_ids, *copies[2].block_ids} & {*copies[1].block_ids, *copies[3].block_ids}
    assert copies[1].block_ids == copies[3].block_ids[:1]
    with pytest.raises(ConfigError):
        scale(trace, 0.0)


def test_blocks_of_another_size() -> None:
    """A workload's block of 512 tokens is 32 of 16; only full ones have a hash, and equal prefixes have equal ones."""
    one, other = Arrival(0, 700, 1, (5, 6)), Arrival(0, 1024, 1, (5, 7))
    hashes, others = block_hashes(one, 16), block_hashes(other, 16)
    assert len(hashes) == 700 // 16
    assert hashes[:32] == others[:32]
    assert not set(hashes[32:]) & set(others)
    with pytest.raises(ConfigError, match="divide"):
        block_hashes(one, 24)
