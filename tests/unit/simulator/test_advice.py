"""The parts of an advice, each by itself: the work of a load, the search, the answer, what is drawn and shown."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.core.errors import ConfigError
from pdserve.core.slo import SloTargets
from pdserve.simulator.advice_drawn import Histogram, drawn
from pdserve.simulator.advice_load import Compute, Load, fitting_chunk, prefill_workers, within_alone
from pdserve.simulator.advice_search import higher, highest, smallest
from pdserve.simulator.advice_settings import advice_ground
from pdserve.simulator.advice_trials import Candidate
from pdserve.simulator.advice_verdict import Side, Why, decide, impossible
from pdserve.simulator.costs import Fitted
from pdserve.simulator.flags import Flags
from pdserve.simulator.workload import Arrival, loop, read_trace

COST = Fitted((0.0, 0.1, 0.0), (10.0, 0.0, 1.0))  # ms: 0.1 a token of a prompt; 10 and 1 an answer


def test_the_load_is_described() -> None:
    """Rate, spread of lengths, and what a cache would have held: the second prompt begins as the first one did."""
    load = Load.of([Arrival(0.0, 1024, 10, (1, 2)), Arrival(1.0, 1024, 30, (1, 3)), Arrival(2.0, 100, 20)])
    assert (load.requests, load.seconds, load.rate, load.burstiness) == (3, 2.0, 1.0, 0.0)
    assert (load.output.mean, load.output.p50, load.prompt.p99) == (20.0, 20, 1024)
    assert load.repeated == pytest.approx(512 / 2148)


def test_prompts_are_packed_and_answers_batched_up_to_the_target() -> None:
    """Two prompts of 1,000 tokens take 200 ms in steps of 512; 20 answers at once take the 30 ms that are promised."""
    arrivals = [Arrival(0.0, 1000, 11), Arrival(1.0, 1000, 11)]
    compute = Compute.of(arrivals, COST, 0.03, chunk=512, max_seqs=64, kv_tokens=1_000_000)
    assert compute.prefill == pytest.approx(0.1)
    assert (compute.batch, compute.decode_step) == (20, pytest.approx(0.03))
    assert compute.decode == pytest.approx(10 * 0.03 / 20)
    assert compute.ratio == pytest.approx(0.1 / 0.015)
    crowded = Compute.of(arrivals, COST, 0.03, chunk=512, max_seqs=64, kv_tokens=4000)
    assert crowded.batch == 3  # 1,005.5 tokens each


def test_a_load_that_decodes_nothing_is_all_prefill() -> None:
    """A single token is the prefill's."""
    compute = Compute.of([Arrival(0.0, 1000, 1)], COST, 0.03, chunk=512, max_seqs=64, kv_tokens=10_000)
    assert (compute.decode, compute.batch, compute.ratio) == (0.0, 0, math.inf)


@pytest.mark.parametrize(
    ("workers", "ratio", "prefill"), [(4, 1.0, 2), (4, 3.0, 3), (4, 0.1, 1), (4, math.inf, 3), (2, 9.0, 1)]
)
def test_pools_are_as_large_as_their_work(workers: int, ratio: float, prefill: int) -> None:
    """And neither is empty."""
    assert prefill_workers(workers, ratio) == prefill


def test_an_idle_worker_bounds_what_any_fleet_keeps() -> None:
    """A prompt that takes a second, and an answer whose own step is too long."""
    targets = SloTargets(0.5, 0.02, 99.0)
    assert within_alone([Arrival(0.0, 100, 9), Arrival(1.0, 10_000, 9)], COST, targets, 512) == 0.5
    assert within_alone([Arrival(0.0, 100, 9)], COST, SloTargets(0.5, 0.01, 99.0), 512) == 0.0


def test_the_search_begins_with_a_step_that_fits() -> None:
    """0.1 ms a token beside 10 answers of 1 ms leaves 400 tokens of 50 ms: 256 is the power of two."""
    assert fitting_chunk([Arrival(0.0, 1000, 9)], COST, 0.05, batch=20) == 256
    assert fitting_chunk([Arrival(0.0, 1000, 9)], COST, 0.001, batch=20) == 32


def counted(below: float) -> tuple[Callable[[float], bool], list[float]]:
    asked: list[float] = []

    def serves(rate: float) -> bool:
        asked.append(rate)
        return rate <= below

    return serves, asked


@pytest.mark.parametrize("start", [0.1, 7.0, 900.0])
def test_the_highest_rate_is_found_from_anywhere(start: float) -> None:
    """Within the tolerance, from below."""
    serves, asked = counted(7.3)
    assert 7.3 / 1.02 <= highest(serves, start, 0.02) <= 7.3
    assert len(asked) < 20


def test_nothing_is_served_at_any_rate() -> None:
    """The search ends, and says 0."""
    serves, asked = counted(0.0)
    assert highest(serves, 5.0, 0.02) == 0.0
    assert len(asked) < 20


def test_one_question_rules_a_fleet_out() -> None:
    """And one that is better is followed up."""
    serves, asked = counted(10.0)
    assert higher(serves, 10.0, 0.02) is None and len(asked) == 1
    assert 10 / 1.02 <= (higher(serves, 3.0, 0.02) or 0) <= 10


@pytest.mark.parametrize("start", [1, 5, 17, 64])
@pytest.mark.parametrize("wanted", [1, 2, 5, 40, 64])
def test_the_smallest_fleet_is_found(start: int, wanted: int) -> None:
    """From any guess; none where the largest is too small."""
    assert smallest(lambda workers: workers >= wanted, start, 64) == wanted
    assert smallest(lambda workers: False, start, 64) is None


def side(goodput: float, needed: int | None = 4, *, split: bool = False) -> Side:
    candidate = Candidate(512, prefill=1, decode=3) if split else Candidate(512, colocated=4)
    return Side(candidate, goodput, 0.95, needed)


@pytest.mark.parametrize(
    ("colocated", "split", "yes", "why"),
    [
        (side(10), side(12, split=True), True, Why.BETTER),
        (side(10), side(11, split=True), False, Why.TIE),
        (side(10), side(10, split=True), False, Why.TIE),
        (side(10), side(9, split=True), False, Why.WORSE),
        (side(10, needed=2), side(30, split=True), False, Why.LOW_LOAD),
        (side(10, needed=1), side(30, split=True), False, Why.LOW_LOAD),
        (side(0, needed=None), side(3, split=True), True, Why.BETTER),
        (side(0, needed=None), side(0, needed=None, split=True), False, Why.IMPOSSIBLE),
    ],
)
def test_a_tie_means_no(colocated: Side, split: Side, yes: bool, why: Why) -> None:
    """More parts have to be worth it; so has a fleet that the load does not fill."""
    verdict = decide(colocated, split, rate=8.0, margin=0.1)
    assert (verdict.disaggregate, verdict.why) == (yes, why)
    assert verdict.sentence.startswith("yes, as 1P3D" if yes else "no")


def test_the_margin_is_the_users() -> None:
    """A fifth more is a tie for whoever wants a quarter."""
    verdict = decide(side(10), side(12, split=True), rate=8.0, margin=0.25)
    assert verdict.why is Why.TIE and verdict.margin == pytest.approx(0.2)
    assert verdict.sentence == (
        "no, a tie: as 1P3D, 4 workers serve 12 requests/s within the targets, co-located 10: 20% more, and up to 25% "
        "is a tie"
    )
    assert "only 40.0% of requests" in impossible(0.4, 0.9).sentence


def test_what_a_request_takes() -> None:
    """GPU-seconds count every device of every worker."""
    assert side(8).gpu_seconds(devices=2) == 1.0
    assert side(0).gpu_seconds(devices=2) is None


def test_lengths_are_drawn_from_their_buckets() -> None:
    """By share, from within, and the same again for the same seed."""
    lengths = Histogram((16.0, 32.0, 64.0, math.inf), (0.0, 3.0, 0.0, 1.0))
    rng = random.Random(1)
    counts = Counter("low" if lengths.draw(rng) <= 32 else "high" for _ in range(2000))
    assert counts["low"] / 2000 == pytest.approx(0.75, abs=0.05)
    made = drawn(lengths, Histogram((1.0,), (5.0,)), rate=10.0, count=400, seed=3)
    assert made == drawn(lengths, Histogram((1.0,), (5.0,)), rate=10.0, count=400, seed=3)
    assert all(17 <= a.prompt <= 32 or 64 < a.prompt <= 128 for a in made) and {a.output for a in made} == {1}
    assert Load.of(made).rate == pytest.approx(10, rel=0.2)


def test_a_load_goes_on_without_its_own_prefixes() -> None:
    """Each time is as far behind the one before as its requests are apart, and shares nothing with it."""
    again = loop([Arrival(0.0, 600, 1, (0, 1)), Arrival(2.0, 600, 1, (0, 2))], 2)
    assert [arrival.at for arrival in again] == [0.0, 2.0, 4.0, 6.0]
    assert not {*again[0].block_ids, *again[1].block_ids} & {*again[2].block_ids, *again[3].block_ids}


@pytest.mark.parametrize("key", ["prefill", "decode", "colocated", "max_num_batched_tokens", "speeds", "fetch"])
def test_what_is_varied_cannot_be_said(key: str) -> None:
    """It is named."""
    with pytest.raises(ConfigError, match=f"fleet.{key}: not for an advice"):
        advice_ground(Flags(), {f"fleet.{key}": 2}, {})


def test_flags_are_over_what_a_suite_tells() -> None:
    """And targets are what requests ask for."""
    ground = advice_ground(Flags(ttft_ms=900), {"fleet.kv_tokens": 5000}, {"slo.ttft_ms": 100.0, "slo.itl_ms": 70.0})
    assert (ground.slo.ttft_ms, ground.slo.itl_ms, ground.fleet.kv_tokens) == (900, 70, 5000)
    assert ground.workers().targets == SloTargets(0.9, 0.07, 99.0)
    with pytest.raises(ConfigError, match=r"slo\.stated"):
        advice_ground(Flags(), {"slo.stated": False}, {})


BENCH = '{"pdserve_bench": 1, "requests": [{"at": 1.5, "prompt_tokens": 70, "output_tokens": 9, "ttft_ms": 3}, %s]}'


def test_a_bench_is_a_trace(tmp_path: Path) -> None:
    """What was answered; a request that failed has no length."""
    path = tmp_path / "bench.json"
    path.write_text(
        BENCH % '{"at": 0.5, "prompt_tokens": 8, "output_tokens": 2}, {"at": 2, "prompt_tokens": 5, "output_tokens": 0}'
    )
    assert read_trace(path) == [Arrival(0.0, 8, 2), Arrival(1.0, 70, 9)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            BENCH % '{"at": 0.5, "prompt_tokens": 8}',
            r"requests\.1: not a request of a bench: KeyError\('output_tokens'\)",
        ),
        (BENCH % '{"at": NaN, "prompt_tokens": 8, "output_tokens": 1}', r"requests\.1.*no time"),
        ('{"pdserve_bench": 2, "requests": []}', "no result of a bench"),
        ('{"requests": [{}]}', "no result of a bench"),
        ('{"pdserve_bench": 1, ', "not JSON"),
        ('{"pdserve_bench": 1, "requests": []}', "holds no requests"),
    ],
)
def test_what_is_no_bench_is_refused(tmp_path: Path, text: str, said: str) -> None:
    """The file and the place are named."""
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
