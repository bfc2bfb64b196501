"""A fleet under a virtual clock: arrivals, a router that asks the policy, workers, transfers, failures.

Every random choice comes from one seed, and events of one moment happen in the order in which they were made, so that
the same input gives the same result to the bit.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pdserve.core.errors import ConfigError, InvalidRequest, NoCapacity
from pdserve.core.layout import KVLayout
from pdserve.policy.fleet import FleetView, PlacementRequest, Role, WorkerView
from pdserve.policy.prefix_index import PrefixIndex
from pdserve.policy.routing import Decision, Kind, choose_pair
from pdserve.simulator.costs import CostModel
from pdserve.simulator.worker import Job, Request, Worker, WorkerLimits
from pdserve.simulator.workload import Arrival

Policy = Callable[[FleetView, PlacementRequest], Decision]
AMPLE = WorkerLimits(1 << 20)  # blocks enough for everything


@dataclass(frozen=True, slots=True)
class Outage:
    """`worker_id` dies at `at` and is back, empty, `seconds` later."""

    at: float
    worker_id: str
    seconds: float


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What is simulated. Workers are "prefill-0", "decode-0"...; `colocated` ones are decode workers without prefill
    ones.

    `link_bytes_per_second` is what one worker's network carries in each direction, `link_latency` in seconds what a
    hand-off takes at least. `speeds` slow single workers down or up (1: as the cost model says).
    """

    layout: KVLayout
    cost: CostModel
    prefill: int = 0
    decode: int = 0
    colocated: int = 0
    prefill_limits: WorkerLimits = AMPLE
    decode_limits: WorkerLimits = AMPLE
    decode_cost: CostModel | None = None
    link_bytes_per_second: float = 25e9
    link_latency: float = 1e-3
    speeds: dict[str, float] = field(default_factory=dict)
    outages: tuple[Outage, ...] = ()

    def check(self) -> None:
        """Raise ConfigError for counts and names that contradict each other."""
        if self.colocated and (self.prefill or self.decode):
            raise ConfigError("co-located workers prefill for themselves: leave prefill and decode out")
        if not self.colocated and not (self.prefill and self.decode):
            raise ConfigError("a fleet has prefill and decode workers, or co-located ones")
        names = set(self.names())
        if unknown := sorted({*self.speeds, *(outage.worker_id for outage in self.outages)} - names):
            raise ConfigError(f"no such workers: {unknown}; there are {sorted(names)}")

    def names(self) -> list[str]:
        return [
            *(f"prefill-{index}" for index in range(self.prefill)),
            *(f"decode-{index}" for index in range(self.decode + self.colocated)),
        ]


@dataclass(slots=True, eq=False)
class _Placement:
    prefill: tuple[Worker, Job] | None
    decode: tuple[Worker, Job] | None


class Simulation:
    """One run. `requests` are those that arrived, `workers` what they ran on."""

    def __init__(self, plan: FleetPlan, policy: Policy = choose_pair) -> None:
        plan.check()
        self.plan, self.policy = plan, policy
        self.now = 0.0
        self.requests: list[Request] = []
        self.workers: dict[str, Worker] = {}
        self.transferred_bytes = 0.0
        self.exposed_seconds = 0.0
        self.decisions = 0
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._queue: deque[Request] = deque()
        self._index = PrefixIndex()
        self._placements: dict[int, _Placement] = {}
        self._views: dict[str, tuple[int, WorkerView]] = {}
        self._placed: dict[str, int] = {}
        self._down: set[str] = set()
        self._network_free: dict[tuple[str, str], float] = {}
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
                speed=plan.speeds.get(name, 1.0),
            )
        for outage in plan.outages:
            self._at(outage.at, lambda now, outage=outage: self._die(outage, now))  # type: ignore[misc]

    def run(self, arrivals: Iterable[Arrival]) -> None:
        """Simulate until the last request is through. Raises InvalidRequest for one that no worker could ever take."""
        for number, arrival in enumerate(arrivals):
            request = Request(arrival, number, block_hashes(arrival, self.plan.layout.block_size))
            self.requests.append(request)
            self._at(arrival.at, lambda now, request=request: self._arrive(request))  # type: ignore[misc]
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action(self.now)
            self._dispatch()

    def _at(self, at: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), action))

    def _arrive(self, request: Request) -> None:
        self._queue.append(request)

    def _dispatch(self) -> None:
        while self._queue:
            request = self._queue[0]
            wanted = PlacementRequest(request.tokens, request.remaining, self._held(request))
            decision = self.policy(self._view(), wanted)
            self.decisions += 1
            if decision.kind is Kind.NEVER:
                raise InvalidRequest("prompt", decision.reason)
            if not decision.placed or not self._place(request, decision):
                return
            self._queue.popleft()

    def _place(self, request: Request, decision: Decision) -> bool:
        prefill = self.workers[decision.prefill] if decision.prefill else None
        decode = self.workers[decision.decode] if decision.decode else None
        placement = _Placement(None, None)
        try:
            if decode is not None:
                placement.decode = decode, decode.admit(request, awaits_kv=prefill is not None, decodes=True)
            if prefill is not None:
                placement.prefill = prefill, prefill.admit(request, awaits_kv=False, decodes=False)
        except NoCapacity:  # its cached blocks were part of the room that was counted
            if decode is not None and placement.decode is not None:
                decode.release(placement.decode[1])
            return False
        self._placements[request.number] = placement
        computes = placement.prefill or placement.decode
        assert computes is not None
        request.tries += 1
        if request.dispatched_at < 0:
            request.dispatched_at, request.cached = self.now, computes[1].computed
        for worker in (prefill, decode):
            if worker is not None:
                self._placed[worker.worker_id] = self._placed.get(worker.worker_id, 0) + 1
        computes[0].kick(self.now)
        return True

    def _on_prefilled(self, worker: Worker, job: Job, now: float) -> None:
        placement = self._placements[job.request.number]
        if placement.prefill is None or placement.decode is None:
            return  # it goes on where it is
        decode, target = placement.decode
        missing = max(0, target.goal - target.computed)
        size = missing * self.plan.layout.token_bytes
        seconds = size / self.plan.link_bytes_per_second
        layers = self.plan.layout.num_layers
        ways = ((worker.worker_id, "out"), (decode.worker_id, "in"))
        free = max(self._network_free.get(way, 0.0) for way in ways)
        # Layer by layer: the first one's KV leaves when it is computed, the last one's after all is.
        through = max(job.began + (now - job.began) / layers, free) + seconds
        landed = max(now + seconds / layers, through) + self.plan.link_latency
        for way in ways:
            self._network_free[way] = max(through, free)
        self.transferred_bytes += size
        self.exposed_seconds += landed - now
        self._at(landed, lambda at: self._landed(job.request, placement, at))

    def _landed(self, request: Request, placement: _Placement, now: float) -> None:
        if self._placements.get(request.number) is not placement or placement.prefill is None:
            return  # a worker died meanwhile
        (prefill, source), placement.prefill = placement.prefill, None
        prefill.release(source)
        assert placement.decode is not None
        decode, target = placement.decode
        decode.start(target, now)

    def _on_finished(self, worker: Worker, job: Job, now: float) -> None:
        placement = self._placements.pop(job.request.number)
        if placement.decode is not None and placement.decode[0] is not worker:
            placement.decode[0].release(placement.decode[1])  # the first token was the last

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
        self._queue.appendleft(request)

    def _die(self, outage: Outage, now: float) -> None:
        worker = self.workers[outage.worker_id]
        self._down.add(outage.worker_id)
        for job in worker.lose_all(now):
            self._replay(job.request, worker)
        self._index.drop(outage.worker_id)
        self._at(now + outage.seconds, lambda at: self._revive(worker))

    def _revive(self, worker: Worker) -> None:
        self._down.discard(worker.worker_id)
        worker.version += 1

    def _held(self, request: Request) -> dict[str, int]:
        for worker in self.workers.values():
            stored, removed = worker.pool.take_changes()
            if stored or removed:
                self._index.update(worker.worker_id, stored, removed)
        return self._index.leading(request.hashes)

    def _view(self) -> FleetView:
        return FleetView.of_workers(self._worker_view(worker) for worker in self.workers.values())

    def _worker_view(self, worker: Worker) -> WorkerView:
        known = self._views.get(worker.worker_id)
        if known is not None and known[0] == worker.version:
            return known[1]
        limits = worker.limits
        view = WorkerView(
            worker_id=worker.worker_id,
            role=worker.role,
            layout=worker.layout,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            total_blocks=limits.total_blocks,
            available_blocks=worker.pool.num_available,
            lookahead_tokens=limits.lookahead_tokens,
            watermark_blocks=limits.watermark_blocks,
            connected=worker.worker_id not in self._down,
            placed=self._placed.get(worker.worker_id, 0),
            reported_sequences=len(worker.jobs),
            reported_prefill_tokens=worker.backlog,
            reported_owned_blocks=worker.pool.num_owned,
        )
        self._views[worker.worker_id] = worker.version, view
        return view


def block_hashes(arrival: Arrival, block_size: int) -> list[bytes]:
    """Hashes of a prompt's full blocks of `block_size` tokens, from the ids that the workload gives.

    A block of ours that lies within one of the workload's is named by it and its place there, so blocks must divide.
    """
    if not arrival.block_ids:
        return []
    if arrival.block_tokens % block_size:
        raise ConfigError(f"blocks of {block_size} tokens don't divide the workload's of {arrival.block_tokens}")
    parts = arrival.block_tokens // block_size
    full = arrival.prompt // block_size
    ids: Sequence[int] = arrival.block_ids
    return [
        (ids[index // parts] * parts + index % parts).to_bytes(8, "little")
        for index in range(min(full, len(ids) * parts))
    ]
