"""How a router placed a request: what it decided, what it could have chosen, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pdserve.client.traces import RequestSummary


class DecisionKind(StrEnum):
    """As in decision.proto."""

    REMOTE = "remote"
    LOCAL = "local"
    PREFILL_ONLY = "prefill_only"
    DEFER = "defer"
    WAIT = "wait"
    DOWN = "down"
    NEVER = "never"
    REJECT = "reject"
    UNKNOWN = "unknown"  # of a router newer than this client


class LocalReason(StrEnum):
    """Why a decode worker computes a prompt itself."""

    CONDITIONAL = "conditional"
    HELD = "held"
    NO_PREFILL_WORKERS = "no_prefill_workers"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve a request, as predicted; fields as in decision.proto. Worker ids are empty where there is none.

    `late` and `slow` are by how much, as shares, the targets for first token and gaps would be missed. Where it is not
    `measured` the times compare candidates, no more.
    """

    prefill_worker: str
    decode_worker: str
    queue_ms: float
    compute_ms: float
    transfer_ms: float
    gap_ms: float
    late: float
    slow: float
    cost: float
    accepts: bool
    tight: bool
    cached_tokens: int
    decode_cached_tokens: int
    local_reason: LocalReason | None
    measured: bool

    @property
    def ttft_ms(self) -> float:
        """From the decision to the first token."""
        return self.queue_ms + self.compute_ms + self.transfer_ms


@dataclass(frozen=True, slots=True)
class Decision:
    """One look at a request that waits to be placed, or several in a row with one result. `first_ns` and `last_ns` are
    Unix time by the router's clock; `candidates` are the best of `considered`, best first."""

    kind: DecisionKind
    reason: str
    prefill_worker: str
    decode_worker: str
    first_ns: int
    last_ns: int
    count: int
    waited_ms: float
    tokens: int
    cached_tokens: int
    decode_cached_tokens: int
    ttft_target_ms: float
    itl_target_ms: float
    targets_stated: bool
    candidates: tuple[Candidate, ...] = ()
    considered: int = 0
    local_reason: LocalReason | None = None

    @property
    def placed(self) -> bool:
        """Whether it sent the request to workers."""
        return self.kind in (DecisionKind.REMOTE, DecisionKind.LOCAL, DecisionKind.PREFILL_ONLY)

    @property
    def chosen(self) -> Candidate | None:
        """Of the candidates, the one that it was sent to."""
        return self.candidates[0] if self.placed and self.candidates else None


@dataclass(frozen=True, slots=True)
class Explanation:
    """A request and its decisions, in their order. There were `dropped` more."""

    request: RequestSummary
    decisions: tuple[Decision, ...] = ()
    dropped: int = 0

    @property
    def deciding(self) -> Decision | None:
        """The placement that the first token came of; the latest one while there is no token."""
        ttft = self.request.ttft_ms
        until = None if ttft is None else self.request.arrived_ns + round(1e6 * ttft)
        placed = [found for found in self.decisions if found.placed and (until is None or found.last_ns <= until)]
        return placed[-1] if placed else None

    @property
    def ttft_ms(self) -> float | None:
        """From that decision to the first token, as it was: beside `deciding.chosen.ttft_ms`. None without a token."""
        deciding, ttft = self.deciding, self.request.ttft_ms
        if deciding is None or ttft is None:
            return None
        return ttft - (deciding.last_ns - self.request.arrived_ns) / 1e6
