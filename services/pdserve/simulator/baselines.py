"""Routing policies to judge the default one against: Mooncake's four (FAST 2025, figure 5).

Each has the default policy's signature, sends a prompt on at once, and decodes where load is least. And one for workers
that do both, which the paper has none for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from pdserve.policy.fleet import FleetView, PlacementRequest, Role, WorkerView
from pdserve.policy.reservation import fits
from pdserve.policy.routing import Decision, Kind
from pdserve.simulator.costs import CostModel

# Its paper names the threshold and not its value.
BALANCING = 1.0

Choose = Callable[[Sequence[WorkerView], PlacementRequest], WorkerView]


def random_choice(rng: random.Random) -> Choose:
    """Any worker, whatever it has to do."""
    return lambda workers, request: rng.choice(workers)


def load_balance(workers: Sequence[WorkerView], request: PlacementRequest) -> WorkerView:
    """The fewest tokens that wait, whatever is cached."""
    return min(workers, key=lambda worker: (worker.prefill_backlog, worker.placed, worker.worker_id))


def kv_aware(cost: CostModel, bytes_per_second: float = 0.0) -> Choose:
    """Least predicted TTFT: the prompts that wait, and what of this one is not cached on that worker.

    With `bytes_per_second` as Mooncake's global one: where the best match in the fleet is longer than this worker's by
    more than BALANCING, the rest of it comes over the network and is not computed. The fleet must share its caches.
    """

    def choose(workers: Sequence[WorkerView], request: PlacementRequest) -> WorkerView:
        best = max(request.held.values(), default=0)

        def seconds(worker: WorkerView) -> float:
            held, fetch, size = request.held_tokens(worker), 0.0, worker.layout.block_size
            longest = min(best, (request.tokens - 1) // size) * size
            if bytes_per_second and longest > BALANCING * held:
                fetch = (longest - held) * worker.layout.token_bytes / bytes_per_second
                held = longest
            waits = cost.step([(0, worker.prefill_backlog)], 0, 0) if worker.prefill_backlog else 0.0
            return fetch + waits + cost.step([(held, request.tokens - held)], 0, 0)

        return min(workers, key=lambda worker: (seconds(worker), worker.placed, worker.worker_id))

    return choose


def least_work(view: FleetView, request: PlacementRequest) -> Decision:
    """For co-located workers, as a load balancer in front of them does well: where the fewest prompt tokens are before
    its first one, those of its own prompt that are not cached there with them, then where the fewest answers are."""
    workers = [w for w in view.of(Role.DECODE) if w.usable and _room(w, request, decoding=True)]
    if not workers:
        return Decision(Kind.WAIT, "no worker has room")
    chosen = min(
        workers,
        key=lambda w: (w.prefill_backlog + request.tokens - request.held_tokens(w), w.load, w.placed, w.worker_id),
    )
    return Decision(Kind.LOCAL, "least work", None, chosen.worker_id)


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
    if worker.answers >= worker.max_num_seqs:
        return False
    return fits(fresh, worker.room, worker.watermark_blocks, worker.answers > 0)
