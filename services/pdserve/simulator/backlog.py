"""What waits in the simulated router, and what its tenants are charged for it: as the router's dispatcher does it."""

from __future__ import annotations

from pdserve.policy.fairness import OUTPUT_WEIGHT, FairQueue, Rank, answer_cost
from pdserve.policy.fleet import FleetView, PlacementRequest
from pdserve.policy.forecast import Ahead
from pdserve.policy.queueing import Deferral, least_work
from pdserve.simulator.request import Request


class Backlog:
    """`deferred` and `overtaken` are what passes over the queue remember."""

    def __init__(self) -> None:
        self.queue: FairQueue[Request] = FairQueue()
        self.deferred: dict[Request, Deferral] = {}
        self.overtaken: dict[Request, int] = {}

    def enter(self, request: Request, wanted: PlacementRequest, view: FleetView) -> None:
        """It waits. A first try will be charged to its tenant, with the answer that is expected."""
        first = not request.tries
        if first:
            request.charged = answer_cost(wanted.expected, request.remaining)
        cost = request.tokens + request.charged if first else 0
        self.queue.add(request, request.arrival.tenant, _rank(request), cost, least_work(wanted, view))

    def leave(self, request: Request, *, served: bool) -> None:
        """It waits no longer."""
        (self.queue.serve if served else self.queue.remove)(request)
        self.overtaken.pop(request, None)

    def settle(self, request: Request) -> None:
        """It is over, and its answer was as long as it was. Does nothing where it was never placed."""
        if request.tries:
            cost, request.charged = OUTPUT_WEIGHT * request.produced - request.charged, 0
            self.queue.charge(request.arrival.tenant, _rank(request), cost)

    def ahead(self, request: Request) -> Ahead:
        """What would go before it if it came now."""
        work, count = self.queue.ahead(request.arrival.tenant, _rank(request))
        return Ahead(work.tokens, work.squares, count)


def _rank(request: Request) -> Rank:
    """The more urgent class first; in it who was there before, then in order of arrival."""
    return -request.arrival.priority, not request.tries, request.number
