"""Where a prompt may be computed: on a prefill worker, on the decode worker itself, or not yet.

Disaggregation never falls back silently: a fleet that has prefill workers waits for one of them unless it was told
otherwise, and the reason is part of every decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pdserve.policy.draining import Leave
from pdserve.policy.fleet import FleetView, PlacementRequest, WorkerView


class NoWorker(StrEnum):
    """What to do while no worker of a role is up."""

    WAIT = "wait"  # for a stated time
    LOCAL = "local"  # decode workers compute prompts; without those, as WAIT
    FAIL = "fail"


class Local(StrEnum):
    """Why a decode worker would compute a prompt itself."""

    CONDITIONAL = "conditional"  # what its running answers lose counts, and still nothing is quicker
    HELD = "held"  # it has all but a step's worth
    NO_PREFILL_WORKERS = "no_prefill_workers"  # none in this fleet, or none up and the rules say so


class Protect(StrEnum):
    """Which target goes first where not both can be kept."""

    ITL = "protect-itl"  # prompts wait before decode workers are oversubscribed
    TTFT = "protect-ttft"


@dataclass(frozen=True, slots=True)
class Rules:
    """What a deployment decides. `no_worker_seconds` is how long NoWorker.WAIT waits; a request that names a priority
    above `max_priority` has that one."""

    protect: Protect = Protect.ITL
    local_prefill: bool = True
    no_worker: NoWorker = NoWorker.WAIT
    no_worker_seconds: float = 30.0
    max_priority: int = 0
    leave_rule: Leave = Leave.NEEDED


@dataclass(frozen=True, slots=True)
class Places:
    """`remote` and `local` are where prompts may be computed; `reason` says why not in both. `down`: since prefill
    workers that there are, or were, are not up."""

    remote: bool
    local: bool
    reason: str
    down: bool = False


def prefill_places(view: FleetView, rules: Rules) -> Places:
    """Where this fleet computes prompts now."""
    if any(worker.usable for worker in view.prefill):
        return Places(True, rules.local_prefill, "prefill workers are up")
    if view.prefill:
        reason = f"all prefill workers are down or draining ({len(view.prefill)} known)"
        if rules.no_worker is NoWorker.LOCAL:
            return Places(False, True, reason)
        return Places(False, False, reason, down=True)
    if view.unanswered:
        names = ", ".join(view.unanswered)
        return Places(False, False, f"no prefill worker known, and {names} not heard from yet")
    return Places(False, True, "no prefill workers in this fleet")


def gives_up(request: PlacementRequest, rules: Rules) -> bool:
    """Whether a request for which no worker is up has waited long enough."""
    return rules.no_worker is NoWorker.FAIL or request.down_for >= rules.no_worker_seconds


def holds_prompt(request: PlacementRequest, decode: WorkerView) -> bool:
    """Whether `decode` has so much of the prompt that the rest, at most a block, is computed there in one step."""
    held = request.held_tokens(decode)
    return held > 0 and request.tokens - held <= decode.layout.block_size
