"""A fleet of two and what to expect of it, for tests of what is drawn."""

from __future__ import annotations

from pdserve.core.layout import KVLayout
from pdserve.core.slo import SloTargets
from pdserve.simulator.costs import Fitted
from pdserve.simulator.drawing import Drawing
from pdserve.simulator.plan import FleetPlan
from pdserve.simulator.report import Report
from pdserve.simulator.simulation import Simulation
from pdserve.simulator.workload import Arrival

TARGETS = SloTargets(ttft=0.5, itl=0.05, itl_percentile=99.0)
LAYOUT = KVLayout(16, 4, 2, 64, "float16", bytes(16))


def small_drawing() -> Drawing:
    """Two requests on one pair: prefill takes 100 ms, a token 10 ms, the second waits for the first."""
    plan = FleetPlan(LAYOUT, Fitted((100, 0, 0), (10, 0, 0)), prefill=1, decode=1, link_latency=0.0)
    simulation = Simulation(plan)
    simulation.run([Arrival(0.0, 64, 11), Arrival(0.05, 2048, 11)])
    return Drawing.of("two", simulation, Report.of(simulation, TARGETS), TARGETS)
