"""Routing policies to judge the default one against: Mooncake's four (FAST 2025, figure 5).

Each has the default policy's signature, sends a prompt on at once, and decodes where load is least.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from pdserve.policy.fleet import FleetView, PlacementRequest, Role, WorkerView
from pdserve.policy.reservation import fits
from pdserve.policy.routing import Decision, Kind
from pdserve.simulator.costs import CostModel

Choose = Callable[[Sequence[WorkerView], PlacementRequest], WorkerView]


def random_choice(rng: random.Random) -> Choose:
    """Any worker, whatever it has to do."""
    return lambda workers, request: rng.choice(workers)


def load_balance(workers: Sequence[WorkerView], request: PlacementRequest) -> WorkerView:
    """The fewest tokens that wait, whatever is cached."""
    return min(workers, key=lambda worker: (worker.prefill_backlog, worker.placed, worker.worker_id))


def kv_aware(cost: CostModel) -> Choose:
    """Least predicted TTFT: the prompts that wait, and what of this one is not cached on that worker."""

    def choose(workers: Sequence[WorkerView], request: PlacementRequest) -> WorkerView:
        def seconds(worker: WorkerView) -> float:
            held = request.held_tokens(worker)
            waits = cost.step([(0, worker.prefill_backlog)], 0, 0) if worker.prefill_backlog else 0.0
            return waits + cost.step([(held, request.tokens - held)], 0, 0)

        return min(workers, key=lambda worker: (seconds(worker), worker.placed, worker.worker_id))

    return choose


def policy(choose: Choose) -> Callable[[FleetView, PlacementRequest], Decision]:
    """A policy whose prefill worker is `choose`'s, with the least loaded decode worker that has room."""

    def decide(view: FleetView, request: PlacementRequest) -> Decision:
        prefillers = [w for w in view.of(Role.PREFILL) if w.usable and _room(w, request, decoding=False)]
        if not prefillers:
            return Decision(Kind.WAIT, "no prefill worker has room")
        prefill = choose(prefillers, request)
        if request.remaining <= 1:
            return Decision(Kind.PREFILL_ONLY, "a single token", prefill.worker_id)
        decoders = [w for w in view.of(Role.DECODE) if w.usable and _room(w, request, decoding=True)]
        if not decoders:
            return Decision(Kind.WAIT, "no decode worker has room")
        decode = min(decoders, key=lambda w: (w.load, w.placed, w.worker_id))
        return Decision(Kind.REMOTE, "baseline", prefill.worker_id, decode.worker_id)

    return decide


def _room(worker: WorkerView, request: PlacementRequest, *, decoding: bool) -> bool:
    fresh = request.blocks(worker, decoding=decoding)
    return worker.has_seat and fits(fresh, worker.room, worker.watermark_blocks, worker.reported_sequences > 0)
