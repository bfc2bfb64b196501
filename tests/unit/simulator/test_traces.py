"""What Mooncake (FAST 2025) reports of its own traces, on those traces.

PDSERVE_TEST_TRACES names the folder that has them: `mooncake/{conversation,synthetic}_trace.jsonl` as its repository
has them, and `figdata/mooncake_fig9_hitrate_vs_capacity.csv` with the paper's figure 9 as numbers.
"""

from __future__ import annotations

import csv
import os
import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from pdserve.core.layout import KVLayout
from pdserve.core.slo import SloTargets
from pdserve.policy.routing import choose_pair
from pdserve.simulator import baselines
from pdserve.simulator.cache_study import hit_rate, prefill_seconds
from pdserve.simulator.costs import MOONCAKE
from pdserve.simulator.plan import Fetch, FleetPlan, Policy, Reject, WorkerLimits
from pdserve.simulator.report import Report
from pdserve.simulator.simulation import Simulation
from pdserve.simulator.workload import Arrival, read_trace, scale

FOLDER = os.environ.get("PDSERVE_TEST_TRACES", "")
pytestmark = pytest.mark.skipif(not FOLDER, reason="PDSERVE_TEST_TRACES names no folder with traces")

LAYOUT = KVLayout(512, 80, 8, 128, "bfloat16", bytes(16))
LIMITS = WorkerLimits(3_000_000 // 512, 256, 8192, lookahead_tokens=128, watermark_blocks=4)
LINK = 100e9
KV_AWARE = baselines.policy(baselines.kv_aware(MOONCAKE))


@cache
def trace(name: str) -> list[Arrival]:
    return read_trace(Path(FOLDER) / "mooncake" / f"{name}_trace.jsonl")


def fleet(prefill: int, decode: int) -> FleetPlan:
    return FleetPlan(LAYOUT, MOONCAKE, prefill, decode, 0, LIMITS, LIMITS, link_bytes_per_second=LINK, fetch=Fetch.NONE)


def replay(plan: FleetPlan, policy: Policy, arrivals: list[Arrival], targets: SloTargets) -> Report:
    simulation = Simulation(plan, policy)
    simulation.run(arrivals)
    return Report.of(simulation, targets)


@pytest.mark.parametrize(
    ("nodes", "rate", "count"), [(2, 0.3, 500), pytest.param(8, 1.0, None, marks=pytest.mark.slow)], ids=["part", "all"]
)
def test_policies_rank_as_published(nodes: int, rate: float, count: int | None) -> None:
    """Figure 5, half of the nodes for prefill; a quarter of them for a part of the trace at about a quarter of the
    rate: mean time to first token is least by KV-aware global, then local, then load balance, then random. What the
    router runs is no worse than any of them, without a cache that all share."""
    arrivals = scale(trace("conversation"), rate, count)
    alone, targets = fleet(nodes, nodes), SloTargets(30, 0.2, 90)
    shared = replace(alone, fetch=Fetch.FLEET)
    found = [
        replay(replace(alone, fetch=Fetch.PAIR), choose_pair, arrivals, targets),
        replay(shared, baselines.policy(baselines.kv_aware(MOONCAKE, LINK)), arrivals, targets),
        replay(alone, KV_AWARE, arrivals, targets),
        replay(alone, baselines.policy(baselines.load_balance), arrivals, targets),
        replay(alone, baselines.policy(baselines.random_choice(random.Random(1))), arrivals, targets),
    ]
    means = [report.ttft.mean for report in found]
    assert means == sorted(means)
    assert found[1].hit_rate > found[2].hit_rate > found[3].hit_rate
    assert (found[1].fetched_rate > 0, found[2].fetched_rate) == (True, 0)


def test_rejecting_by_prediction_wastes_less() -> None:
    """Overload of both pools. By the load that is predicted fewer are rejected than by the load of now, and no prompt
    is computed for nothing; with immediate dispatch by the load of now, Mooncake's baseline, fewer are served in time.
    """
    arrivals, targets = scale(trace("conversation"), 1.0, 800), SloTargets(30, 0.035, 99)
    plan = replace(fleet(3, 2), targets=targets, fetch=Fetch.PAIR)
    current, predicted = (replace(plan, reject=reject) for reject in (Reject.CURRENT, Reject.PREDICTED))
    theirs = replay(current, KV_AWARE, arrivals, targets)
    ours_now = replay(current, choose_pair, arrivals, targets)
    ours = replay(predicted, choose_pair, arrivals, targets)
    assert 0 < ours.rejected < ours_now.rejected < theirs.rejected
    assert ours.wasted_prefill_seconds == 0 < ours_now.wasted_prefill_seconds < theirs.wasted_prefill_seconds
    assert ours.attainment > theirs.attainment
    for report in (theirs, ours_now, ours):
        assert report.requests + report.rejected == len(arrivals) and report.failed == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_hit_rates_of_one_cache(name: str) -> None:
    """Figure 9, one least-recently-used cache for all: within 5 points at ten capacities and more."""
    with (Path(FOLDER) / "figdata" / "mooncake_fig9_hitrate_vs_capacity.csv").open(
        encoding="utf-8", newline=""
    ) as lines:
        points = [row for row in csv.DictReader(lines) if row["series"] == name]
    assert len(points) >= 10
    for point in points:
        found = hit_rate(trace(name), int(float(point["capacity_tokens"])), 512)
        assert found == pytest.approx(float(point["hit_rate"]), abs=0.05), point


@pytest.mark.parametrize(("name", "cached", "alone"), [("conversation", 1.06, 1.66), ("synthetic", 0.73, 2.02)])
def test_prefill_seconds(name: str, cached: float, alone: float) -> None:
    """Figure 8, seconds of prefill a request with Mooncake's cache and without any: within 7%."""
    fit = [figure / 1e3 for figure in MOONCAKE.prefill]
    for wanted, with_cache in ((cached, True), (alone, False)):
        assert prefill_seconds(trace(name), *fit, cached=with_cache) == pytest.approx(wanted, rel=0.07)
