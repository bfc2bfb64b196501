"""What the simulated router knows of its workers: views, and who holds which blocks, kept up by what changed."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.policy.fleet import Assumed, FleetView, LinkFacts, Role, WorkerView
from pdserve.policy.prefix_index import PrefixIndex
from pdserve.simulator.plan import FleetPlan
from pdserve.simulator.worker import Worker

# What speeds to assume of workers that nobody knows yet is found anew once in so many seconds: it takes a look at all.
ASSUME_EVERY = 1.0


class Watch:
    """Hears of everything at once: a router does so a message later."""

    def __init__(self, plan: FleetPlan, workers: Sequence[Worker]) -> None:
        self.down: set[str] = set()
        self.placed = dict.fromkeys((worker.worker_id for worker in workers), 0)
        self._index = PrefixIndex()
        link = LinkFacts(plan.link_bytes_per_second, "simulated")
        self._links = dict.fromkeys(self.placed, link)
        self._pools: dict[Role, list[WorkerView]] = {role: [] for role in Role}
        self._slot: dict[str, int] = {}
        self._dirty: dict[str, Worker] = {}
        self._assumed, self._assumed_at = Assumed(), -ASSUME_EVERY
        for worker in workers:
            self._slot[worker.worker_id] = len(self._pools[worker.role])
            self._pools[worker.role].append(self._look(worker))
        self._views = {view.worker_id: view for pool in self._pools.values() for view in pool}
        self._view = self._made()

    @property
    def changed(self) -> bool:
        """Whether the next view will be another one."""
        return bool(self._dirty)

    def note(self, worker: Worker) -> None:
        """`worker` is not what it was."""
        self._dirty[worker.worker_id] = worker

    def lost(self, worker: Worker) -> None:
        """`worker` died: nothing is left of its cache."""
        self.down.add(worker.worker_id)
        self._index.drop(worker.worker_id)
        self.note(worker)

    def back(self, worker: Worker) -> None:
        self.down.discard(worker.worker_id)
        self.note(worker)

    def held(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Worker -> how many leading blocks of `hashes` it holds."""
        return self._index.leading(hashes)

    def view(self, now: float) -> FleetView:
        """Of this moment; the same object as long as nothing changes."""
        if self._dirty:
            for worker in self._dirty.values():
                stored, removed = worker.pool.take_changes()
                if stored or removed:
                    self._index.update(worker.worker_id, stored, removed)
                view = self._look(worker)
                self._views[worker.worker_id] = view
                self._pools[worker.role][self._slot[worker.worker_id]] = view
            self._dirty.clear()
            if now >= self._assumed_at + ASSUME_EVERY:
                self._assumed, self._assumed_at = Assumed.of(self._views.values()), now
            self._view = self._made()
        return self._view

    def _made(self) -> FleetView:
        prefill, decode = (tuple(self._pools[role]) for role in (Role.PREFILL, Role.DECODE))
        return FleetView(prefill, decode, dict(self._views), assumed=self._assumed)

    def _look(self, worker: Worker) -> WorkerView:
        limits = worker.limits
        return WorkerView(
            worker_id=worker.worker_id,
            role=worker.role,
            layout=worker.layout,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            total_blocks=limits.total_blocks,
            available_blocks=worker.pool.num_available,
            lookahead_tokens=limits.lookahead_tokens,
            watermark_blocks=limits.watermark_blocks,
            connected=worker.worker_id not in self.down,
            placed=self.placed[worker.worker_id],
            reported_sequences=len(worker.jobs),
            reported_bounded=len(worker.jobs) if worker.itl_target is not None else 0,
            reported_prefill_tokens=worker.backlog,
            reported_prefill_squares=worker.backlog_squares,
            reported_owned_blocks=worker.pool.num_owned,
            step_since=worker.step_since,
            speed=worker.estimate.speed,
            links=self._links,
        )
