"""Figures, by literals that can be checked by hand."""

from __future__ import annotations

import pytest

from pdserve.bench.figures import OUTSIDE, Figures, Means
from pdserve.bench.record import Told
from pdserve.client import Stages
from pdserve.core.slo import SloTargets
from tests.unit.bench.samples import record

TARGETS = SloTargets(ttft=1.0, itl=0.5, itl_percentile=99.0)
GOOD = record((0.5, 1), (0.75, 1), at=0.0, told=Told(10, 2, cached_tokens=4))
SLOW = record((3.0, 1), (3.25, 1), at=1.0, number=1, prompt=30, told=Told(30, 2))
FULL = record(at=2.0, number=2, error="RESOURCE_EXHAUSTED: no room: none")
GONE = record((4.0, 1), at=3.5, number=3, output=2, ended=5.0, error="UNAVAILABLE: gone")
RECORDS = [GOOD, SLOW, FULL, GONE]


def test_rates_and_shares() -> None:
    """Attainment is of all that were offered; throughput of what was answered, over the whole run."""
    figures = Figures.of(RECORDS, 5.0, TARGETS, Means())
    assert (figures.requests, figures.answered) == (4, 2)
    assert figures.errors == {"RESOURCE_EXHAUSTED": 1, "UNAVAILABLE": 1}
    assert figures.verdicts == {"failed": 2, "met": 1, "missed_ttft": 1}
    assert (figures.attainment, figures.goodput) == (0.25, 0.2)
    assert (figures.answered_per_second, figures.output_tokens_per_second) == (0.4, 0.8)
    assert figures.prompt_tokens_per_second == 8.0
    assert figures.offered_per_second == pytest.approx(3 / 3.5)
    assert figures.cached_share == 0.1


def test_latencies_are_of_answered_requests() -> None:
    figures = Figures.of(RECORDS, 5.0, TARGETS, Means())
    assert (figures.ttft_ms.count, figures.ttft_ms.p50, figures.ttft_ms.p99) == (2, 500.0, 2000.0)
    assert (figures.itl_ms.count, figures.itl_ms.greatest) == (2, 250.0)
    assert figures.tpot_ms.mean == 250.0
    assert (figures.e2e_ms.p50, figures.e2e_ms.greatest) == (750.0, 2250.0)


def test_what_a_request_costs() -> None:
    """Held is number times duration, used is what its processes took; each for an answered request."""
    figures = Figures.of(RECORDS, 5.0, TARGETS, Means(gpus=4, cores=2, cpu_seconds=3.0))
    assert (figures.gpu_seconds_per_request, figures.core_seconds_per_request) == (10.0, 5.0)
    assert figures.cpu_seconds_per_request == 1.5
    assert (figures.goodput_per_gpu, figures.goodput_per_core) == (0.05, 0.1)
    nothing = Figures.of(RECORDS, 5.0, TARGETS, Means())
    assert nothing.gpu_seconds_per_request is nothing.goodput_per_core is nothing.cpu_seconds_per_request is None


def test_stages_and_the_rest_are_the_time_to_first_token() -> None:
    told = Told(10, 1, stages=Stages(100.0, 50.0, 200.0, 7.0, 8.0, 9.0))
    figures = Figures.of([record((0.5, 1), told=told)], 1.0, TARGETS, Means())
    spent = {name: spread.mean for name, spread in figures.stages_ms.items()}
    assert spent["queue"] + spent["reserve"] + spent["prefill"] + spent[OUTSIDE] == pytest.approx(500.0)
    assert (spent["transfer_exposed"], spent["decode_wait"], spent["first_step"]) == (7.0, 8.0, 9.0)
    assert Figures.of([GOOD], 1.0, TARGETS, Means()).stages_ms == {}


def test_nobody_was_answered() -> None:
    """Then there is no cost of an answer, and no share of cached tokens."""
    figures = Figures.of([FULL], 2.0, TARGETS, Means(gpus=1))
    assert (figures.attainment, figures.goodput, figures.ttft_ms.count) == (0.0, 0.0, 0)
    assert figures.gpu_seconds_per_request is figures.cached_share is None


def test_tokens_that_no_chunk_owned_up_to() -> None:
    figures = Figures.of([record((1.0, 1), (2.0, 1), output=5, told=Told(10, 5))], 2.0, TARGETS, Means())
    assert (figures.assumed_tokens, figures.output_tokens_per_second) == (3, 2.5)
