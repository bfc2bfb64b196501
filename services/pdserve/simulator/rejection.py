"""Who is turned away at the door, or after its prompt: nobody, by the load of now, or by the load that is predicted."""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.core.slo import SloTargets
from pdserve.policy.admission import admit
from pdserve.policy.fleet import FleetView, PlacementRequest, Role
from pdserve.policy.forecast import Ahead, Forecast
from pdserve.policy.routing import DEFAULT_RULES
from pdserve.simulator.plan import Reject
from pdserve.simulator.request import Request
from pdserve.simulator.worker import Worker


class Door:
    """Asked for each request at its arrival, and by REJECT.CURRENT once more when its prompt is through.

    The load of now is what workers do at this moment, as in Mooncake (FAST 2025, section 6.2): prompts that wait, and
    answers that are decoded. So it does not see who is between the two, and what is let in for their absence comes too
    much: their prefill is wasted.
    """

    def __init__(self, reject: Reject, workers: Iterable[Worker]) -> None:
        self._reject = reject
        self._decodes = [worker for worker in workers if worker.role is Role.DECODE]

    def turns_away(self, view: FleetView, wanted: PlacementRequest, ahead: Ahead) -> bool:
        """At its arrival, behind those that wait in the router and go before it."""
        if self._reject is Reject.NEVER:
            return False
        if self._reject is Reject.PREDICTED:
            return not admit(view, wanted, ahead).admitted
        times = Forecast(view, wanted, ahead, DEFAULT_RULES).ttft()
        late = times is not None and times[0] > wanted.planned.ttft >= times[1]
        return late or all(self._crowded(worker, wanted.tokens, wanted.planned) for worker in self._decodes)

    def sends_back(self, request: Request, decode: Worker, targets: SloTargets | None) -> bool:
        """When its prompt is through."""
        return self._reject is Reject.CURRENT and targets is not None and self._crowded(decode, request.tokens, targets)

    @staticmethod
    def _crowded(worker: Worker, tokens: int, targets: SloTargets) -> bool:
        """Whether one more answer would make the gaps of those that are decoded now too long."""
        speed, context = worker.estimate.speed, sum(job.computed for job in worker.running)
        if not speed.knows_answers or speed.decode_seconds(1, tokens) > targets.itl:
            return False
        return speed.decode_seconds(len(worker.running) + 1, context + tokens) > targets.itl
