"""A decision, carried out in the books: which workers have the sequence, and what it is to each of them."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.policy.fleet import FleetView, PlacementRequest, Target
from pdserve.policy.routing import Decision, Kind
from pdserve.router.fleet import Fleet
from pdserve.router.ledger import Entry, Work
from pdserve.router.worker import Worker


@dataclass(slots=True, eq=False)
class Assignment:
    """A decision with the workers it names, accounted for in their ledgers until `release`."""

    decision: Decision
    prefill: Worker | None
    decode: Worker | None
    prefill_entry: Entry | None
    decode_entry: Entry | None
    decode_tokens_held: int = 0  # leading tokens that the decode worker probably has in its cache

    def replace_prefill(self, other: Assignment) -> None:
        """Another prefill worker's half takes the place of ours, which is taken off its ledger."""
        if self.prefill_entry is not None:
            self.prefill_entry.close()
        self.prefill, self.prefill_entry = other.prefill, other.prefill_entry

    def release(self) -> None:
        """Take it off the ledgers. May be called again."""
        for entry in (self.prefill_entry, self.decode_entry):
            if entry is not None:
                entry.close()


def assign(fleet: Fleet, view: FleetView, decision: Decision, request: PlacementRequest) -> Assignment | None:
    """Account for a decision that was made on `view`. None: a worker went away between the view and now."""
    assignment = Assignment(decision, None, None, None, None)
    for worker_id, decoding in ((decision.prefill, False), (decision.decode, True)):
        if worker_id is None:
            continue
        worker, known = fleet.by_id(worker_id), view.index.get(worker_id)
        if worker is None or known is None:
            assignment.release()
            return None
        held = request.held_tokens(known)
        computes = not decoding or decision.kind is Kind.LOCAL
        entry = worker.ledger.add(
            Work(
                tokens=request.tokens,
                prefill_tokens=request.tokens - held if computes else 0,
                prefill_squares=request.tokens**2 - held**2 if computes else 0,
                blocks=request.blocks(known, decoding=decoding),
                bounded=Target.ITL in request.stated,
            )
        )
        if decoding:
            assignment.decode, assignment.decode_entry = worker, entry
            assignment.decode_tokens_held = request.held.get(worker_id, 0) * known.layout.block_size
        else:
            assignment.prefill, assignment.prefill_entry = worker, entry
    return assignment
