"""Disaggregate or not, for loads whose answer is known: workers whose steps with prompts have a large constant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pdserve.core.errors import ConfigError
from pdserve.core.layout import KVLayout
from pdserve.core.slo import SloTargets
from pdserve.simulator.advice import Advice, Question, advise
from pdserve.simulator.advice_verdict import Why
from pdserve.simulator.costs import Fitted
from pdserve.simulator.plan import FleetPlan, WorkerLimits
from pdserve.simulator.workload import Arrival, Lengths, Synthetic, merge

TARGETS = SloTargets(ttft=0.6, itl=0.035, itl_percentile=99.0)
# A step with prompts takes 20 ms and 0.05 ms a token, one without 10 ms, each answer 0.1 ms. So two steps of answers
# fit into what is planned of the gap that is promised (`policy.batching.SHARE`), and one with 128 tokens of a prompt,
# which is mostly the constant.
PLAN = FleetPlan(
    KVLayout(16, 4, 1, 64, "bfloat16", bytes(16)),
    Fitted((20.0, 0.05, 0.0), (10.0, 0.0, 0.1)),
    decode_limits=WorkerLimits(30_000, max_num_seqs=16),
    targets=TARGETS,
)


def chats(rate: float, count: int) -> list[Arrival]:
    return Synthetic(rate, Lengths(100), Lengths(40)).arrivals(count, seed=1)


def documents(rate: float, count: int) -> list[Arrival]:
    return Synthetic(rate, Lengths(4000), Lengths(40)).arrivals(count, seed=2)


def asked(arrivals: Sequence[Arrival], workers: int | None = None) -> Advice:
    return advise(PLAN, arrivals, Question(workers))


def test_low_load_is_a_no() -> None:
    """One co-located worker is enough, and two are the fewest that can be disaggregated."""
    advice = asked(chats(2, 40))
    assert (advice.verdict.disaggregate, advice.verdict.why, advice.workers) == (False, Why.LOW_LOAD, 2)
    assert advice.colocated is not None and advice.colocated.needed == 1
    assert "one co-located worker is enough" in advice.verdict.sentence


def test_uniform_short_prompts_are_a_no() -> None:
    """Where a prompt is a part of a step there is nothing to protect streams from, however much arrives."""
    advice = asked(chats(60, 120), workers=3)
    assert not advice.verdict.disaggregate and advice.verdict.why in (Why.WORSE, Why.TIE)
    assert advice.verdict.margin is not None and advice.verdict.margin <= 0.1
    assert advice.colocated is not None and advice.colocated.goodput > 10


def test_chats_beside_long_documents_are_a_yes() -> None:
    """Steps that are short enough for the chats are too short for the documents, and the ratio is that of the work."""
    advice = asked(merge([chats(12, 96), documents(3, 24)]), workers=3)
    assert advice.verdict.disaggregate and advice.verdict.why is Why.BETTER
    assert advice.split is not None and advice.colocated is not None
    assert (advice.split.candidate.prefill, advice.split.candidate.decode) == (2, 1)
    assert advice.compute.ratio > 1
    assert advice.split.goodput > 1.1 * advice.colocated.goodput
    assert advice.verdict.sentence.startswith("yes, as 2P1D: 3 workers serve")


def test_the_same_input_gives_the_same_advice() -> None:
    """To the bit, and each simulation is told of."""
    told: list[int] = []
    plan = replace(PLAN, decode_limits=replace(PLAN.decode_limits, max_num_seqs=2), targets=replace(TARGETS, ttft=0.3))
    first, second = (
        advise(plan, chats(4, 30), Question(2), listener) for listener in (told.append, lambda count: None)
    )
    assert first == second
    assert told == list(range(1, len(told) + 1)) and 0 < first.simulations <= len(told)


def test_targets_that_nobody_can_keep_are_a_no_at_once() -> None:
    """What an idle worker misses no ratio can keep, so nothing is simulated."""
    plan = replace(PLAN, targets=replace(TARGETS, itl=0.005))
    advice = advise(plan, chats(2, 50), Question())
    assert (advice.verdict.why, advice.alone, advice.simulations) == (Why.IMPOSSIBLE, 0.0, 0)
    assert (advice.colocated, advice.split, advice.tried) == (None, None, ())


def test_requests_without_a_rate_are_refused() -> None:
    """All at once is no rate."""
    with pytest.raises(ConfigError, match="3 requests that all arrive at once"):
        asked([Arrival(0.0, 10, 10)] * 3)
