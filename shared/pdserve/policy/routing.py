"""Which workers a sequence goes to. Pure: the same view and request give the same decision.

A candidate's cost is the tokens that it still has to compute for this sequence plus the tokens that it has to do with
already. So a cached prefix decides between equals, but a prefix that everybody shares does not pull everybody to one
worker. What is left of ties goes to the one that was given fewest so far, then to more room, then to the lower id.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from pdserve.policy.disaggregation import Place, choose_prefill_place
from pdserve.policy.fleet import FleetView, PlacementRequest, Role, WorkerView
from pdserve.policy.reservation import fits


class Kind(StrEnum):
    REMOTE = "remote"  # a pair: prefill there, decode here
    LOCAL = "local"  # the decode worker does both
    PREFILL_ONLY = "prefill_only"  # one token: nobody takes the KV
    WAIT = "wait"  # nothing now; ask again when the view has changed
    NEVER = "never"  # no worker of this fleet could ever take it


@dataclass(frozen=True, slots=True)
class Decision:
    """Where to, by worker id, and why."""

    kind: Kind
    reason: str
    prefill: str | None = None
    decode: str | None = None

    @property
    def placed(self) -> bool:
        return self.kind not in (Kind.WAIT, Kind.NEVER)


def choose_pair(view: FleetView, request: PlacementRequest) -> Decision:
    """Decide for one sequence. Changes nothing; the caller accounts for what it places before it asks again."""
    if request.remaining <= 1 and view.of(Role.PREFILL):
        return _prefill_only(view, request)
    decoders = [worker for worker in view.of(Role.DECODE) if worker.usable]
    if not decoders:
        return Decision(Kind.WAIT, "no decode worker is up")
    if all(request.blocks(worker, decoding=False) > worker.total_blocks for worker in view.of(Role.DECODE)):
        largest = max(worker.total_blocks * worker.layout.block_size for worker in decoders)
        return Decision(Kind.NEVER, f"{request.tokens} tokens, the largest decode worker has room for {largest}")
    waits = []
    for decode in _best_first(_with_room(decoders, request, decoding=True), request):
        where = choose_prefill_place(view, request, decode)
        if where.place is Place.LOCAL:
            if _accepts_prompt(decode):
                return Decision(Kind.LOCAL, where.reason, decode=decode.worker_id)
            waits.append("every decode worker has prompts enough to compute")
        elif where.place is Place.WAIT:
            waits.append(where.reason)
        else:
            peers = [worker for worker in view.of(Role.PREFILL) if worker.layout == decode.layout]
            prefill = _choose_prefill(peers, request)
            if prefill is not None:
                return Decision(Kind.REMOTE, _why(request, prefill, decode), prefill.worker_id, decode.worker_id)
            waits.append("no prefill worker has room")
    return Decision(Kind.WAIT, waits[0] if waits else "no decode worker has room")


def choose_prefill(view: FleetView, request: PlacementRequest, decode: str) -> Decision:
    """Decide for a sequence that holds a reservation on the worker `decode` already: who fills it. Changes nothing."""
    worker = next((worker for worker in view.of(Role.DECODE) if worker.worker_id == decode), None)
    if worker is None:
        return Decision(Kind.WAIT, f"decode worker {decode} is gone")
    peers = [peer for peer in view.of(Role.PREFILL) if peer.layout == worker.layout]
    prefill = _choose_prefill(peers, request)
    if prefill is not None:
        return Decision(Kind.REMOTE, _why(request, prefill, worker), prefill=prefill.worker_id)
    if not any(peer.usable for peer in peers):
        return Decision(Kind.WAIT, f"all prefill workers are down or draining ({len(peers)} known)")
    return Decision(Kind.WAIT, "no prefill worker has room")


def _prefill_only(view: FleetView, request: PlacementRequest) -> Decision:
    known = view.of(Role.PREFILL)
    if all(request.blocks(worker, decoding=False) > worker.total_blocks for worker in known):
        largest = max(worker.total_blocks * worker.layout.block_size for worker in known)
        return Decision(Kind.NEVER, f"{request.tokens} tokens, the largest prefill worker has room for {largest}")
    prefill = _choose_prefill(known, request)
    if prefill is not None:
        return Decision(Kind.PREFILL_ONLY, "a single token needs no decode worker", prefill=prefill.worker_id)
    if not any(worker.usable for worker in known):
        return Decision(Kind.WAIT, f"all prefill workers are down or draining ({len(known)} known)")
    return Decision(Kind.WAIT, "no prefill worker has room")


def _choose_prefill(workers: Iterable[WorkerView], request: PlacementRequest) -> WorkerView | None:
    usable = [worker for worker in workers if worker.usable and _accepts_prompt(worker)]
    return next(iter(_best_first(_with_room(usable, request, decoding=False), request)), None)


def _accepts_prompt(worker: WorkerView) -> bool:
    """A worker with a step's worth of prompts waits for no more: later ones are decided later, with newer views."""
    return worker.prefill_backlog < max(1, worker.max_num_batched_tokens)


def _with_room(workers: Iterable[WorkerView], request: PlacementRequest, *, decoding: bool) -> list[WorkerView]:
    fitting = []
    for worker in workers:
        # A held block costs nothing where others use it too. Where nobody does it is part of the room that is counted,
        # and the worker, which knows, may refuse; whoever was refused once waits until there is room in any case.
        held = 0 if request.was_refused else request.held_tokens(worker) // worker.layout.block_size
        fresh = min(request.blocks(worker, decoding=decoding), worker.total_blocks) - held
        others = max(worker.sequences, worker.reported_sequences) > 0
        room = fits(fresh, worker.room, worker.watermark_blocks, others)
        if worker.has_seat and room and worker.worker_id not in request.excluded:
            fitting.append(worker)
    return fitting


def _best_first(workers: Iterable[WorkerView], request: PlacementRequest) -> list[WorkerView]:
    def cost(worker: WorkerView) -> tuple[int, int, int, int, str]:
        work = request.tokens - request.held_tokens(worker) + worker.load
        return work, worker.outstanding_tokens, worker.placed, -worker.room, worker.worker_id

    return sorted(workers, key=cost)


def _why(request: PlacementRequest, prefill: WorkerView, decode: WorkerView) -> str:
    return (
        f"prefill holds {request.held_tokens(prefill)}, decode holds {request.held_tokens(decode)} "
        f"of {request.tokens} tokens; loads {prefill.load} and {decode.load}"
    )
