"""Tenants under the virtual clock: whoever floods the fleet waits behind its own requests."""

from __future__ import annotations

from dataclasses import replace

from pdserve.core.layout import KVLayout
from pdserve.core.slo import SloTargets
from pdserve.simulator.costs import Fitted
from pdserve.simulator.plan import FleetPlan, Reject, WorkerLimits
from pdserve.simulator.report import ttft
from pdserve.simulator.simulation import Simulation
from pdserve.simulator.workload import Arrival

LAYOUT = KVLayout(16, 40, 40, 128, "float16", bytes(16))
LIMITS = WorkerLimits(100_000, max_num_seqs=512, max_num_batched_tokens=2048)
# A prompt of 2,048 tokens takes a third of a second: two workers compute six of them in a second.
PLAN = FleetPlan(LAYOUT, Fitted((22.0, 0.14, 8e-6), (23.0, 6e-4, 0.06)), 2, 2, 0, LIMITS, LIMITS)
QUIET = [Arrival(0.53 + 9.7 * number, 2048, 4, tenant="quiet") for number in range(5)]
FLOOD = [Arrival(0.1 * number, 2048, 4, tenant="flood") for number in range(500)]


def quiet_ttfts(arrivals: list[Arrival]) -> list[float]:
    simulation = Simulation(PLAN)
    simulation.run(sorted(arrivals, key=lambda arrival: arrival.at))
    ours = {arrival.at for arrival in QUIET}
    found = [ttft(request) for request in simulation.requests if request.arrival.at in ours]
    assert len(found) == len(QUIET)
    return found


def test_a_flood_does_not_starve_another_tenant() -> None:
    """A hundred requests of one tenant to each of the other's, nearly twice what the fleet can do: the other's first
    tokens take at most twice as long as they do alone, each of them."""
    alone, beside = quiet_ttfts(QUIET), quiet_ttfts(QUIET + FLOOD)
    assert all(late <= 2 * early for late, early in zip(beside, alone, strict=True))


def test_without_tenants_it_would() -> None:
    """The same load of one tenant: first come, first served, so that the last one waits for a quarter of a minute."""
    one = [replace(arrival, tenant="") for arrival in QUIET + FLOOD]
    assert quiet_ttfts(one)[-1] > 20 * quiet_ttfts(QUIET)[-1]


def test_whoever_floods_is_refused_and_not_the_other() -> None:
    """Judged by what would go first: the flood's own requests, and of them for the other tenant only the next one."""
    plan = replace(PLAN, targets=SloTargets(1.2, 10.0, 99.0), reject=Reject.PREDICTED)
    simulation = Simulation(plan)
    simulation.run(sorted(QUIET + FLOOD, key=lambda arrival: arrival.at))
    refused = [request.arrival.tenant for request in simulation.requests if request.rejected]
    assert refused.count("flood") > 50 and "quiet" not in refused


def test_what_is_cached_is_no_work_ahead() -> None:
    """Forty long prompts that are on a worker already, but for a block, refuse nobody."""
    ids = tuple(range(16))
    warm = [Arrival(3.0 * number, 8192, 2, tuple(range(100 * number, 100 * number + 16)), 512) for number in range(5)]
    first = Arrival(15.0, 8192, 2, ids, 512)
    crowd = [Arrival(20.0, 8192 + 16 * number, 2, ids, 512) for number in range(40)]
    last = Arrival(20.001, 512, 2)
    plan = replace(PLAN, targets=SloTargets(4.0, 10.0, 99.0), reject=Reject.PREDICTED)
    simulation = Simulation(plan)
    simulation.run([*warm, first, *crowd, last])
    assert [request.rejected for request in simulation.requests] == [False] * 47


def test_long_answers_are_charged_while_they_run() -> None:
    """One tenant's prompts are short and its answers long: it is not served many times before the other has its turn,
    though none of its answers has ended."""
    limits = replace(LIMITS, max_num_seqs=8)
    plan = replace(PLAN, decode_limits=limits)
    known = [Arrival(0.0, 64, 500, tenant="")]
    long = [Arrival(30.0, 64, 1000, tenant="long") for _ in range(60)]
    short = [Arrival(30.0, 1064, 500, tenant="short") for _ in range(60)]
    simulation = Simulation(plan)
    simulation.run([*known, *(arrival for pair in zip(long, short, strict=True) for arrival in pair)])
    order = sorted(simulation.requests[1:], key=lambda request: (request.dispatched_at, request.number))
    placed = [request.arrival.tenant for request in order[:16]]
    assert 4 <= placed.count("short") <= 12, placed


def test_a_higher_class_goes_first() -> None:
    """Whatever its tenant has got already."""
    urgent = [replace(arrival, tenant="flood", priority=1) for arrival in QUIET]
    assert max(quiet_ttfts(urgent + FLOOD)) < 2.5 * max(quiet_ttfts(QUIET))
