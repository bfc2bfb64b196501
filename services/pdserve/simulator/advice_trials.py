"""Fleets to compare, and simulations of them at one rate or another, each made once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pdserve.policy.disaggregation import Rules
from pdserve.policy.routing import choose_pair
from pdserve.simulator.baselines import least_work
from pdserve.simulator.plan import FleetPlan, Policy
from pdserve.simulator.report import Report, met, ttft
from pdserve.simulator.request import Request
from pdserve.simulator.simulation import Simulation
from pdserve.simulator.workload import Arrival, loop, scale


@dataclass(frozen=True, slots=True)
class Candidate:
    """`colocated` workers, or `prefill` and `decode` ones. `chunk` is the most tokens in a step of workers that decode,
    `prefill_chunk` of others. `conditional`: decode workers prefill what is quicker there, as the router's default.
    `balanced`: co-located workers are chosen by `baselines.least_work`, else all are by the router's policy."""

    chunk: int
    colocated: int = 0
    prefill: int = 0
    decode: int = 0
    prefill_chunk: int = 0
    conditional: bool = True
    balanced: bool = False

    @property
    def workers(self) -> int:
        return self.colocated + self.prefill + self.decode

    @property
    def ratio(self) -> str:
        """ "2P3D", or "5 co-located"."""
        return f"{self.colocated} co-located" if self.colocated else f"{self.prefill}P{self.decode}D"

    @property
    def details(self) -> str:
        """How it is tuned."""
        if self.colocated:
            return f"steps of {self.chunk} tokens, {'least work first' if self.balanced else 'as the router chooses'}"
        local = f"prefills of {self.chunk} tokens on decode workers, too" if self.conditional else "never there"
        return f"steps of {self.prefill_chunk} tokens, {local}"


class Trials:
    """Asks how `arrivals` fare on fleets whose workers are those of `plan`, which must have targets.

    A request is served where it keeps both targets, and a rate where the share `goal` of all requests is. `made` is
    told after each simulation how many there were; `simulations` is that count.
    """

    def __init__(
        self,
        plan: FleetPlan,
        arrivals: Sequence[Arrival],
        rate: float,
        goal: float,
        seconds: float,
        made: Callable[[int], None],
    ) -> None:
        """`rate` in requests a second is what `arrivals` come at as they are. Where they come so fast that all are
        there within `seconds`, they come again and again for so long: queues take a while to show."""
        assert plan.targets is not None
        self.simulations = 0
        self._plan, self._targets, self._arrivals, self._rate = plan, plan.targets, arrivals, rate
        self._goal, self._seconds, self._made = goal, seconds, made
        self._known: dict[tuple[Candidate, float], bool] = {}

    def serves(self, candidate: Candidate, rate: float) -> bool:
        """Whether `candidate` serves requests that come at `rate` a second. The simulation ends as soon as too many
        have missed a target."""
        asked = candidate, rate
        if asked not in self._known:
            arrivals, missed = self._at_rate(rate), set[int]()
            allowed = int((1 - self._goal) * len(arrivals) + 1e-9)

            def watch(request: Request) -> None:
                if self._missed(request):
                    missed.add(request.number)
                    if len(missed) > allowed:
                        simulation.stop()

            simulation = self._simulation(candidate, watch)
            self._run(simulation, arrivals)
            self._known[asked] = len(missed) <= allowed
        return self._known[asked]

    def report(self, candidate: Candidate, rate: float) -> Report:
        """What `candidate` does at `rate`, to the end."""
        simulation = self._simulation(candidate, lambda request: None)
        self._run(simulation, self._at_rate(rate))
        return Report.of(simulation, self._targets)

    def _missed(self, request: Request) -> bool:
        """Whether it is certain that a target was missed."""
        if request.outcome is not None:
            return not met(request, self._targets)
        return ttft(request) > self._targets.ttft

    def _simulation(self, candidate: Candidate, listener: Callable[[Request], None]) -> Simulation:
        plan, limits = self._plan, self._plan.decode_limits
        fleet = replace(
            plan,
            prefill=candidate.prefill,
            decode=candidate.decode,
            colocated=candidate.colocated,
            prefill_limits=replace(limits, max_num_batched_tokens=candidate.prefill_chunk or candidate.chunk),
            decode_limits=replace(limits, max_num_batched_tokens=candidate.chunk),
        )
        routed: Policy = partial(choose_pair, rules=Rules(local_prefill=candidate.conditional))
        return Simulation(fleet, least_work if candidate.balanced else routed, listener)

    def _at_rate(self, rate: float) -> list[Arrival]:
        arrivals = scale(self._arrivals, rate / self._rate)
        return loop(arrivals, max(1, math.ceil(self._seconds * rate / len(arrivals))))

    def _run(self, simulation: Simulation, arrivals: Sequence[Arrival]) -> None:
        simulation.run(arrivals)
        self.simulations += 1
        self._made(self.simulations)
