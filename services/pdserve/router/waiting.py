"""What waits to be placed, and what is remembered of its earlier tries."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.core.layout import KVLayout
from pdserve.core.slo import SloTargets
from pdserve.policy.fairness import Rank
from pdserve.policy.fleet import DEFAULT_TARGETS, Target
from pdserve.router.assignment import Assignment
from pdserve.router.decisions import DecisionLog
from pdserve.router.models import ServedModel
from pdserve.router.worker import Worker

REFUSAL_FIRST = 0.05  # seconds that a worker which refused is left alone; doubles
REFUSAL_MAX = 1.0


@dataclass(slots=True)
class Refusals:
    """Which workers one request should not be sent to. A hard one lasts for a time that doubles (a worker's report does
    not lift it: each try costs a prefill); a soft one (it failed there) only decides while there is another worker."""

    hard: dict[str, float] = field(default_factory=dict)
    soft: set[str] = field(default_factory=set)
    count: int = 0

    def refuse(self, worker: Worker, now: float) -> float:
        """Note a refusal; returns for how many seconds it holds at most."""
        seconds = min(REFUSAL_MAX, REFUSAL_FIRST * 2.0 ** min(self.count, 10))
        self.count += 1
        self.hard[worker.worker_id] = now + seconds
        return seconds

    def standing(self, now: float) -> frozenset[str]:
        """The workers of which a hard refusal still holds."""
        self.hard = {worker_id: until for worker_id, until in self.hard.items() if now < until}
        return frozenset(self.hard)


@dataclass(frozen=True, slots=True)
class Wishes:
    """Who asks, and what for beside an answer. `session` names its conversation. `stated` are
    those of the targets that the request named, or whoever runs the router: for their sake it waits, or is refused."""

    tenant: str = ""
    session: str = ""
    targets: SloTargets = DEFAULT_TARGETS
    stated: frozenset[Target] = frozenset()


def fresh_class(priority: int) -> Rank:
    """The class of a request that holds no reservation, as the beginning of its rank."""
    return ((True, -priority),)


@dataclass(slots=True, eq=False)
class Waiting:
    """One sequence that wants to be placed. `hashes` are its block hashes for each layout in the fleet; `decode` is the
    decode worker that holds a reservation for it, where only a prefill worker is wanted. `arrived` is the loop's time;
    `arrival` numbers requests in that order."""

    model: ServedModel
    tokens: int
    remaining: int
    priority: int
    replay: bool
    arrived: float
    arrival: int
    hashes: Mapping[KVLayout, list[bytes]]
    refusals: Refusals
    wishes: Wishes = Wishes()
    log: DecisionLog = field(default_factory=DecisionLog)
    decode: str | None = None
    reason: str = "not looked at yet"
    queued: float = 0.0  # when this wait began, the loop's time
    future: asyncio.Future[Assignment] | None = None

    @property
    def rank(self) -> Rank:
        """First out first. Classes: who holds a reservation (others may wait for that room), then by priority. Within
        one and the same tenant's: replays (they hold up an answer that somebody reads), then who is due first."""
        due = self.arrived + self.wishes.targets.ttft
        return (self.decode is None, -self.priority), not self.replay, due, self.arrival

    @property
    def charge(self) -> int:
        """Prompt tokens that placing it costs its tenant: those of a first try, once."""
        return 0 if self.replay or self.decode is not None else self.tokens
