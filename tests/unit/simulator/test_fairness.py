"""Tenants under the virtual clock: whoever floods the fleet waits behind its own requests."""

from __future__ import annotations

from dataclasses import replace

from pdserve.core.layout import KVLayout
from pdserve.simulator.costs import Fitted
from pdserve.simulator.plan import FleetPlan, WorkerLimits
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


def test_a_higher_class_goes_first() -> None:
    """Whatever its tenant has got already."""
    urgent = [replace(arrival, tenant="flood", priority=1) for arrival in QUIET]
    assert max(quiet_ttfts(urgent + FLOOD)) < 2.5 * max(quiet_ttfts(QUIET))
