"""What waits to be placed, and what is remembered of its earlier tries."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.core.layout import KVLayout
from pdserve.core.slo import SloTargets
from pdserve.policy.fairness import FairQueue, PromptWork, Rank, answer_cost
from pdserve.policy.fleet import DEFAULT_TARGETS, Target
from pdserve.policy.queueing import Deferral, Terms
from pdserve.router.assignment import Assignment
from pdserve.router.conversations import Pace
from pdserve.router.decisions import DecisionLog
from pdserve.router.models import ServedModel
from pdserve.router.worker import Worker
from pdserve.rpc.api_keys import ApiKey

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


@dataclass(slots=True)
class Account:
    """What a request's tenant was charged for its `answer`, before there was one."""

    answer: int = 0


@dataclass(frozen=True, slots=True)
class Wishes:
    """Who asks, and what for beside an answer. `session` names its conversation. `stated` are those of the targets that
    the request named, or whoever runs the router: for their sake it waits, or is refused. `key` is the API key that it
    showed; None: none is asked for."""

    tenant: str = ""
    session: str = ""
    targets: SloTargets = DEFAULT_TARGETS
    stated: frozenset[Target] = frozenset()
    key: ApiKey | None = None


def fresh_class(priority: int) -> Rank:
    """The class of a request that holds no reservation, as the beginning of its rank."""
    return ((True, -priority),)


@dataclass(slots=True, eq=False)
class Waiting:
    """One sequence that wants to be placed. `hashes` are its block hashes for each layout in the fleet. `decode` is the
    decode worker that holds a reservation for it, where only a prefill worker is wanted; `leaves` is the one that it
    runs on and has to leave, where only another decode worker is. `resumed`: another router began its answer. `arrived`
    is the loop's time; `arrival` numbers requests in that order. `expected` is how long answers were when it came; 0:
    not known."""

    model: ServedModel
    tokens: int
    remaining: int
    priority: int
    replay: bool
    arrived: float
    arrival: int
    hashes: Mapping[KVLayout, list[bytes]]
    refusals: Refusals
    wishes: Wishes = field(default_factory=Wishes)
    account: Account = field(default_factory=Account)
    log: DecisionLog = field(default_factory=DecisionLog)
    decode: str | None = None
    leaves: str | None = None
    resumed: bool = False
    reason: str = "not looked at yet"
    expected: int = 0
    queued: float = 0.0  # when this wait began, the loop's time
    future: asyncio.Future[Assignment] | None = None

    @property
    def rank(self) -> Rank:
        """First out first. Classes: who holds pages (others may wait for that room), then by priority. Within
        one and the same tenant's: who goes on (it holds up an answer that somebody reads), then who is due first."""
        due = self.arrived + self.wishes.targets.ttft
        return (not (self.decode or self.leaves), -self.priority), not (self.replay or self.resumed), due, self.arrival

    @property
    def charge(self) -> int:
        """What placing it costs its tenant: a first try's prompt, and the answer that it probably gets."""
        return self.tokens + self.answer_charge if self._first else 0

    @property
    def answer_charge(self) -> int:
        """The answer's part of that, settled when there is one."""
        return answer_cost(self.expected, self.remaining) if self._first else 0

    @property
    def _first(self) -> bool:
        return not self.replay and self.decode is None

    @property
    def terms(self) -> Terms | None:
        """What it insists on: short gaps, or to go on with the pages that it has."""
        if self.decode is not None:
            return Terms(("decode", self.decode), 0.0)
        if self.leaves is not None:
            return Terms(("leaves", self.leaves), 0.0)
        if Target.ITL in self.wishes.stated:
            return Terms(("tenant", self.wishes.tenant), self.wishes.targets.itl)
        return None


@dataclass(slots=True)
class ModelQueue:
    """What waits for one model, in its order, and what its passes remember."""

    waiting: FairQueue[Waiting] = field(default_factory=FairQueue)
    deferred: dict[Waiting, Deferral] = field(default_factory=dict)
    overtaken: dict[Waiting, int] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    down_since: float | None = None  # the loop's time from which on nobody is up for its head
    down_look: asyncio.TimerHandle | None = None  # when that will have been for long enough
    told: str = ""

    def add(self, item: Waiting, work: PromptWork) -> None:
        self.waiting.add(item, item.wishes.tenant, item.rank, item.charge, work)

    def leave(self, item: Waiting, *, served: bool, now: float) -> None:
        """Does nothing where it does not wait. `now` is the loop's time."""
        if item not in self.waiting:
            return
        self.deferred.pop(item, None)
        self.overtaken.pop(item, None)
        if served:
            self.waiting.serve(item)
            item.account.answer += item.answer_charge
            self.pace.placed(now, others_wait=bool(self.waiting))
        else:
            self.waiting.remove(item)
            if not self.waiting:
                self.pace.idle()
