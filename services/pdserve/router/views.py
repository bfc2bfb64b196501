"""Immutable views of a model's workers, for the policies: remade where something changed, and only there.

A fleet of a thousand workers reports some ten thousand times a second. So a worker that says something is only marked,
and a decision that comes after it makes the views of those that are marked.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.core.layout import KVLayout
from pdserve.policy.fleet import Assumed, FleetView, Role, WorkerView
from pdserve.router.models import ModelFacts
from pdserve.router.worker import Worker


class ModelViews:
    """The workers of one model between two changes of membership, by their order: connected ones first, each id once,
    also where two names lead to one worker."""

    def __init__(self, workers: Iterable[Worker], unanswered: tuple[str, ...]) -> None:
        self.workers: dict[str, Worker] = {}
        for worker in sorted(workers, key=lambda worker: not worker.connected):
            self.workers.setdefault(worker.worker_id, worker)
        self.ids = {worker.endpoint: worker_id for worker_id, worker in self.workers.items()}
        self.layouts: frozenset[KVLayout] = frozenset(w.layout for w in self.workers.values() if w.layout is not None)
        self.facts = _facts(self.workers.values())
        self._pools: dict[Role, list[WorkerView]] = {Role.PREFILL: [], Role.DECODE: []}
        self._places: dict[str, tuple[Role, int]] = {}
        for worker in self.workers.values():
            if (view := worker.view()) is not None:
                self._places[worker.endpoint] = view.role, len(self._pools[view.role])
                self._pools[view.role].append(view)
        self._dirty: set[Worker] = set()
        self._news = 0  # views that were remade since it was looked who is fastest
        self._view = FleetView.of_workers((view for pool in self._pools.values() for view in pool), unanswered)

    def touch(self, worker: Worker) -> None:
        """It is another one by now."""
        if worker.endpoint in self._places:
            self._dirty.add(worker)

    def view(self, unanswered: tuple[str, ...]) -> FleetView:
        """As everything is now; the same object as long as nothing changed."""
        if self._dirty:
            self._view = self._remade(unanswered)
            self._dirty.clear()
        elif unanswered != self._view.unanswered:
            view = self._view
            self._view = FleetView(view.prefill, view.decode, view.index, unanswered, view.assumed)
        return self._view

    def _remade(self, unanswered: tuple[str, ...]) -> FleetView:
        index, assumed, learned = dict(self._view.index), self._view.assumed, False
        for worker in self._dirty:
            role, place = self._places[worker.endpoint]
            view, before = worker.view(), self._pools[role][place]
            if view is None:
                continue  # it is about to be another one, which is a change of membership
            self._pools[role][place] = index[view.worker_id] = view
            learned |= _knows(view) != _knows(before)
        # Who is fastest takes a look at everybody: once for as many news as there are workers it costs next to nothing.
        self._news += len(self._dirty)
        if learned or self._news >= len(index):
            assumed, self._news = Assumed.of(index.values()), 0
        return FleetView(tuple(self._pools[Role.PREFILL]), tuple(self._pools[Role.DECODE]), index, unanswered, assumed)


def _knows(view: WorkerView) -> tuple[bool, bool]:
    return view.speed.knows_prompts, view.speed.knows_answers


def _facts(workers: Iterable[Worker]) -> ModelFacts | None:
    """What the workers said about the model, also those that are down; None: none ever spoke."""
    snapshots = [worker.snapshot for worker in workers if worker.role is not None and worker.snapshot]
    if not snapshots:
        return None
    return ModelFacts(min(s.max_model_len for s in snapshots), min(s.vocab_size for s in snapshots))
