"""Where a prompt is computed: on a prefill worker, on the decode worker itself, or not yet.

Disaggregation never falls back silently: a fleet that has prefill workers waits for one of them, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pdserve.policy.fleet import FleetView, PlacementRequest, Role, WorkerView


class Place(StrEnum):
    REMOTE = "remote"
    LOCAL = "local"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class PrefillPlace:
    place: Place
    reason: str


def choose_prefill_place(view: FleetView, request: PlacementRequest, decode: WorkerView) -> PrefillPlace:
    """Where to compute the prompt of a sequence that `decode` is going to continue."""
    held, block = request.held_tokens(decode), decode.layout.block_size
    if held and request.tokens - held <= block:
        return PrefillPlace(Place.LOCAL, f"decode worker holds {held} of {request.tokens} tokens")
    known = view.of(Role.PREFILL)
    if any(worker.usable for worker in known):
        return PrefillPlace(Place.REMOTE, "prefill workers are up")
    if known:
        return PrefillPlace(Place.WAIT, f"all prefill workers are down or draining ({len(known)} known)")
    if view.unanswered:
        names = ", ".join(view.unanswered)
        return PrefillPlace(Place.WAIT, f"no prefill worker known, and {names} not heard from yet")
    return PrefillPlace(Place.LOCAL, "no prefill workers in this fleet")
