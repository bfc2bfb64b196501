"""A fleet under a virtual clock: arrivals, a router that asks the policy, workers, transfers, failures.

Every random choice comes from one seed, and events of one moment happen in the order in which they were made, so that
the same input gives the same result to the bit.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pdserve.core.errors import InvalidRequest, NoCapacity
from pdserve.core.slo import Outcome
from pdserve.policy.fleet import BOTH, DEFAULT_TARGETS, FleetView, PlacementRequest, Role
from pdserve.policy.queueing import LOOKS, Terms, plan_pass
from pdserve.policy.routing import Decision, Kind, choose_pair
from pdserve.simulator.backlog import Backlog
from pdserve.simulator.fetching import choose_source
from pdserve.simulator.network import Network
from pdserve.simulator.plan import FleetPlan, Outage, Policy
from pdserve.simulator.rejection import Door
from pdserve.simulator.request import Job, Request, block_hashes
from pdserve.simulator.watch import Watch
from pdserve.simulator.worker import Worker
from pdserve.simulator.workload import Arrival

RECHECK = 1.0  # seconds after which requests that wait for workers that are down are looked at again


@dataclass(slots=True, eq=False)
class _Placement:
    prefill: tuple[Worker, Job] | None
    decode: tuple[Worker, Job] | None


class Simulation:
    """One run. `requests` are those that arrived, `workers` what they ran on. `listener` is told of a request that has
    its first token, and of one that is over; it may `stop` the run."""

    def __init__(
        self, plan: FleetPlan, policy: Policy = choose_pair, listener: Callable[[Request], None] = lambda request: None
    ) -> None:
        plan.check()
        self.plan, self.policy = plan, policy
        self._listener, self._stopped = listener, False
        self.now = 0.0
        self.requests: list[Request] = []
        self.workers: dict[str, Worker] = {}
        self.network = Network(plan.link_bytes_per_second, plan.link_latency)
        self.exposed_seconds = self.wasted_prefill_seconds = 0.0
        self.decisions = 0
        self._targets = plan.targets or DEFAULT_TARGETS
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._backlog = Backlog()
        self._arrived = False  # somebody waits who was not looked at yet
        self._placements: dict[int, _Placement] = {}
        self._sessions: dict[int, frozenset[str]] = {}
        self._down_since: dict[Role, float] = {}
        self._answers = self._answered_tokens = 0
        for name in plan.names():
            prefill = name.startswith("prefill")
            self.workers[name] = Worker(
                name,
                Role.PREFILL if prefill else Role.DECODE,
                plan.layout,
                plan.prefill_limits if prefill else plan.decode_limits,
                plan.cost if prefill else plan.decode_cost or plan.cost,
                self._at,
                prefilled=self._on_prefilled,
                finished=self._on_finished,
                preempted=self._on_preempted,
                changed=self._on_changed,
                speed=plan.speeds.get(name, 1.0),
                itl_target=plan.targets.itl if plan.targets else None,
            )
        self._watch = Watch(plan, list(self.workers.values()))
        self._door = Door(plan.reject, self.workers.values())
        for outage in plan.outages:
            self._at(outage.at, lambda now, outage=outage: self._die(outage, now))  # type: ignore[misc]

    def run(self, arrivals: Iterable[Arrival]) -> None:
        """Simulate until the last request is through. Raises InvalidRequest for one that no worker could ever take."""
        for number, arrival in enumerate(arrivals):
            request = Request(arrival, number, block_hashes(arrival, self.plan.layout.block_size))
            self.requests.append(request)
            self._at(arrival.at, lambda now, request=request: self._arrive(request))  # type: ignore[misc]
        while self._events and not self._stopped:
            self.now = self._events[0][0]
            while self._events and self._events[0][0] == self.now:
                heapq.heappop(self._events)[2](self.now)
            self._dispatch()

    def stop(self) -> None:
        """Enough is known: end the run with this moment, and leave what is under way as it is."""
        self._stopped = True

    def _at(self, at: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), action))

    def _arrive(self, request: Request) -> None:
        view, wanted = self._view(), self._wanted(request)
        if self._door.turns_away(view, wanted, self._backlog.ahead(request)):
            self._fail(request, rejected=True)
        else:
            self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        self._backlog.enter(request, self._wanted(request), self._view())
        self._arrived = True

    def _dispatch(self) -> None:
        """Place whom the fleet has a place for, as the router's dispatcher does."""
        if not (self._arrived or self._watch.changed):
            return
        self._arrived = False
        while self._backlog.queue and self._pass():
            pass

    def _pass(self) -> bool:
        """Whether anybody went, so that others may be looked at."""
        went = False
        plan = plan_pass(
            self._backlog.queue.first(2 * LOOKS),
            self._view,
            self._wanted,
            self._choose,
            terms_of=self._terms,
            deferred=self._backlog.deferred,
            overtaken=self._backlog.overtaken,
            now=self.now,
        )
        for request, decision in plan:
            self.decisions += 1
            if decision.kind is Kind.NEVER:
                raise InvalidRequest("prompt", decision.reason)
            if decision.kind in (Kind.DOWN, Kind.REJECT):
                self._backlog.leave(request, served=False)
                self._fail(request, rejected=decision.kind is Kind.REJECT)
            elif decision.placed and self._place(request, decision):
                self._backlog.leave(request, served=True)
            elif decision.placed:
                return False
            else:
                continue
            went = True
        return went

    def _view(self) -> FleetView:
        return self._watch.view(self.now)

    def _choose(self, request: Request, view: FleetView, wanted: PlacementRequest) -> Decision:
        return self.policy(view, wanted)

    def _terms(self, request: Request) -> Terms | None:
        return Terms(request.arrival.tenant, self._targets.itl) if self.plan.targets else None

    def _wanted(self, request: Request) -> PlacementRequest:
        session, since = request.arrival.session, max(self._down_since.values(), default=self.now)
        return PlacementRequest(
            tokens=request.tokens,
            remaining=request.remaining,
            held=self._watch.held(request.hashes),
            expected=round(self._answered_tokens / self._answers) if self._answers else 0,
            near=self._sessions.get(session, frozenset()) if session is not None else frozenset(),
            targets=self._targets,
            stated=BOTH if self.plan.targets else frozenset(),
            waited=self.now - request.arrival.at,
            down_for=self.now - max(since, request.arrival.at),
            overtaken=self._backlog.overtaken.get(request, 0),
            draw=request.number,
            now=self.now,
        )

    def _place(self, request: Request, decision: Decision) -> bool:
        prefill = self.workers[decision.prefill] if decision.prefill else None
        decode = self.workers[decision.decode] if decision.decode else None
        placement = _Placement(None, None)
        computes = prefill or decode
        assert computes is not None
        held, receiver = self._watch.held(request.hashes), decode.worker_id if decode else None
        source = choose_source(
            self.plan.fetch, request, held, computes.worker_id, receiver, self._view(), self.network, self.now
        )
        fetches = source.tokens if source else 0
        try:
            if decode is not None:
                local = 0 if prefill else fetches
                job = decode.admit(request, awaits_kv=prefill is not None, decodes=True, fetches=local)
                placement.decode = decode, job
            if prefill is not None:
                job = prefill.admit(request, awaits_kv=False, decodes=False, fetches=fetches)
                placement.prefill = prefill, job
        except NoCapacity:  # its cached blocks were part of the room that was counted
            if decode is not None and placement.decode is not None:
                decode.release(placement.decode[1])
            return False
        self._placements[request.number] = placement
        request.tries += 1
        if request.dispatched_at < 0:
            request.dispatched_at, request.cached = self.now, job.computed + job.fetching
            request.fetched = job.fetching
        names = [worker.worker_id for worker in (prefill, decode) if worker is not None]
        for name in names:
            self._watch.placed[name] += 1
        if request.arrival.session is not None:
            self._sessions[request.arrival.session] = frozenset(names)
        if source is not None and job.fetching:
            self._load(placement, computes, job, self.workers[source.worker_id])
        else:
            computes.kick(self.now)
        return True

    def _load(self, placement: _Placement, computes: Worker, job: Job, source: Worker) -> None:
        size = job.fetching * self.plan.layout.token_bytes
        through = self.network.send(source.worker_id, computes.worker_id, size, self.now)
        life = source.pool

        def landed(now: float) -> None:
            if self._placements.get(job.request.number) is placement:
                computes.fetched(job, now, landed=source.pool is life)

        self._at(through + self.plan.link_latency, landed)

    def _on_changed(self, worker: Worker) -> None:
        self._watch.note(worker)

    def _on_prefilled(self, worker: Worker, job: Job, now: float) -> None:
        self._listener(job.request)
        placement = self._placements[job.request.number]
        if placement.prefill is None or placement.decode is None:
            return  # it goes on where it is
        decode, target = placement.decode
        if self._door.sends_back(job.request, decode, self.plan.targets):
            self._give_up(job.request, worker, job)
            return
        missing = max(0, target.goal - target.computed)
        size = missing * self.plan.layout.token_bytes
        layers = self.plan.layout.num_layers
        # Layer by layer: the first one's KV leaves when it is computed, the last one's after all is.
        earliest = job.began + (now - job.began) / layers
        through = self.network.send(worker.worker_id, decode.worker_id, size, earliest)
        landed = max(now + self.network.seconds(size) / layers, through) + self.plan.link_latency
        self.exposed_seconds += landed - now
        self._at(landed, lambda at: self._landed(job.request, placement, at))

    def _give_up(self, request: Request, worker: Worker, job: Job) -> None:
        """Its prompt was computed for nothing."""
        new, squares = request.arrival.prompt - request.cached, request.arrival.prompt**2 - request.cached**2
        speed = worker.estimate.speed
        self.wasted_prefill_seconds += speed.prompt_seconds(new, squares, worker.limits.max_num_batched_tokens)
        placement = self._placements.pop(request.number)
        for half in (placement.prefill, placement.decode):
            if half is not None:
                half[0].release(half[1])
        self._fail(request, rejected=True)

    def _landed(self, request: Request, placement: _Placement, now: float) -> None:
        if self._placements.get(request.number) is not placement or placement.prefill is None:
            return  # a worker died meanwhile
        (prefill, source), placement.prefill = placement.prefill, None
        prefill.release(source)
        assert placement.decode is not None
        decode, target = placement.decode
        decode.start(target, now)

    def _on_finished(self, worker: Worker, job: Job, now: float) -> None:
        request = job.request
        placement = self._placements.pop(request.number)
        if placement.decode is not None and placement.decode[0] is not worker:
            placement.decode[0].release(placement.decode[1])  # the first token was the last
        self._answers += 1
        self._answered_tokens += request.produced
        self._backlog.settle(request)
        self._listener(request)

    def _on_preempted(self, worker: Worker, job: Job, now: float) -> None:
        self._replay(job.request, worker)

    def _replay(self, request: Request, lost: Worker) -> None:
        """Shown tokens are input from now on; what another worker holds for this try goes back."""
        placement = self._placements.pop(request.number, None)
        if placement is None:
            return
        for half in (placement.prefill, placement.decode):
            if half is not None and half[0] is not lost:
                half[0].release(half[1])
        self._enqueue(request)

    def _fail(self, request: Request, *, rejected: bool) -> None:
        self._backlog.settle(request)
        request.done_at, request.outcome, request.rejected = self.now, Outcome.FAILED, rejected
        self._listener(request)

    def _die(self, outage: Outage, now: float) -> None:
        worker = self.workers[outage.worker_id]
        self._watch.lost(worker)
        for job in worker.lose_all(now):
            self._replay(job.request, worker)
        pool = [other for other in self.workers.values() if other.role is worker.role]
        if all(other.worker_id in self._watch.down for other in pool):
            self._down_since[worker.role] = now
            self._at(now + RECHECK, self._recheck)
        self._at(now + outage.seconds, lambda at: self._revive(worker))

    def _recheck(self, now: float) -> None:
        if self._down_since:
            self._arrived = True
            self._at(now + RECHECK, self._recheck)

    def _revive(self, worker: Worker) -> None:
        self._watch.back(worker)
        self._down_since.pop(worker.role, None)
