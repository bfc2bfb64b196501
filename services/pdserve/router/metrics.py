"""What one router exports: what its clients see of it, and the fleet as it sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from pdserve.core.slo import SloTargets
from pdserve.policy.draining import HandOff
from pdserve.policy.fleet import Role, Target
from pdserve.policy.limits import Limit
from pdserve.policy.routing import Decision
from pdserve.router.fleet import Fleet
from pdserve.router.meter import Ended, Meter
from pdserve.router.models import Models
from pdserve.router.request_metrics import ERRORS, ModelMetrics, RequestMetrics
from pdserve.telemetry.metrics import CollectorRegistry, Labelled, Metric, count, gauge
from pdserve.v1 import worker_pb2

_ROLES = {
    worker_pb2.ROLE_PREFILL: str(Role.PREFILL),
    worker_pb2.ROLE_DECODE: str(Role.DECODE),
    worker_pb2.ROLE_PREFIX_CACHE: "prefix_cache",
}
_STATES = ("connected", "draining", "unreachable")


class RouterMetrics(Meter):
    """A meter of all requests, and a collector of what the router holds. Collecting only reads counts and tuples made
    on the spot, so that it may happen in any thread."""

    def __init__(self, targets: SloTargets) -> None:
        self.registry = CollectorRegistry()
        self._targets = targets
        self._families = RequestMetrics(self.registry)
        self._unauthenticated = count(
            self.registry, "unauthenticated_total", "Calls that showed no API key, or one that is not known."
        )
        self._keys_unreadable = count(
            self.registry, "api_keys_unreadable_total", "Changes of the file of API keys that could not be read."
        )
        self._of: dict[str, ModelMetrics] = {}
        self._in_flight: Counter[str] = Counter()
        self._models = Models(())
        self._fleet: Fleet | None = None
        self._waiting: Callable[[str], int] = lambda model: 0
        self.registry.register(self)

    def start(self, models: Models, fleet: Fleet, waiting: Callable[[str], int]) -> None:
        """Export the fleet too, from now on, and how many requests for each of `models` wait; series begin at 0."""
        self.serve(model.name for model in models)
        self._models, self._fleet, self._waiting = models, fleet, waiting

    def serve(self, models: Iterable[str]) -> None:
        """Only of these models will be told."""
        self._of = {model: ModelMetrics(self._families, model) for model in models}

    # Requests, on the event loop.

    def started(self, model: str) -> None:
        self._in_flight[model] += 1

    def first_token(self, model: str, seconds: float) -> None:
        self._of[model].first_token(seconds)

    def gap(self, model: str, seconds: float) -> None:
        self._of[model].gap(seconds)

    def queued(self, model: str, seconds: float) -> None:
        self._of[model].queue.observe(seconds)

    def decided(self, model: str, decision: Decision) -> None:
        self._of[model].decided(decision)

    def predicted(self, model: str, predicted: float, actual: float) -> None:
        self._of[model].predicted(predicted, actual)

    def refused(self, model: str) -> None:
        self._of[model].refusals.inc()

    def turned_away(self, model: str, why: Limit | Target) -> None:
        self._of[model].turned_away[why].inc()

    def rearmed(self, model: str) -> None:
        self._of[model].rearms.inc()

    def handed_off(self, model: str, outcome: HandOff) -> None:
        self._of[model].hand_offs[outcome].inc()

    def hand_off_gap(self, model: str, seconds: float) -> None:
        self._of[model].hand_off_gap.observe(seconds)

    def rejected(self, code: str) -> None:
        self._families.requests.labels("", ERRORS[code]).inc()

    def unauthenticated(self) -> None:
        self._unauthenticated.inc()

    def keys_unreadable(self) -> None:
        self._keys_unreadable.inc()

    def ended(self, ended: Ended) -> None:
        self._in_flight[ended.model] -= 1
        self._of[ended.model].ended(ended)

    # The state, in whatever thread collects.

    def describe(self) -> Iterator[Metric]:
        """All names that there will ever be, so that the registry can tell one that is taken."""
        yield from self.collect()

    def collect(self) -> Iterator[Metric]:
        targets: Labelled = {("ttft",): self._targets.ttft, ("itl",): self._targets.itl}
        yield gauge("slo_target_seconds", "What requests are promised that name no targets.", targets, ["target"])
        percentile = self._targets.itl_percentile
        yield gauge("slo_itl_percentile", "Percentile of a request's own gaps that the itl target is for.", percentile)
        running: Labelled = {}
        waiting: Labelled = {}
        for model in self._models:
            waits = self._waiting(model.name)
            waiting[model.name,] = float(waits)
            running[model.name,] = float(max(0, self._in_flight[model.name] - waits))
        label = ["model_name"]
        yield gauge("router_num_requests_waiting", "Requests that wait in the router for a worker.", waiting, label)
        yield gauge("router_num_requests_running", "Requests that the router has placed on workers.", running, label)
        labels = ["role", "model_name", "state"]
        yield gauge("workers", "Workers that this router follows, by role and state.", self._workers(), labels)

    def _workers(self) -> Labelled:
        served = [model.name for model in self._models]
        places = [(role, name) for role in (Role.PREFILL, Role.DECODE) for name in served] + [("prefix_cache", "")]
        found: Labelled = {(str(role), name, state): 0.0 for role, name in places for state in _STATES}
        for worker in tuple(self._fleet.workers) if self._fleet else ():
            if worker.snapshot is None or worker.snapshot.role not in _ROLES:
                continue
            model = self._models.announced_as(worker.snapshot.model)
            state = "unreachable" if not worker.connected else "draining" if worker.draining else "connected"
            key = (_ROLES[worker.snapshot.role], model.name if model else "", state)
            found[key] = found.get(key, 0.0) + 1
        return found
