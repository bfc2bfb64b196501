"""The waiting queue: who is placed next, and where. Decisions bind late; workers keep only short queues.

Per model the order is: who holds a decode reservation and lacks only a prefill worker (others may wait for that room),
then priority, then replays before new requests (they hold up an answer that somebody reads), then arrival. The head is
placed when the view allows it; nobody overtakes it, so that a big request does not starve.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import structlog

from pdserve.core.errors import InvalidRequest, NoCapacity
from pdserve.core.layout import KVLayout
from pdserve.policy.fleet import PlacementRequest
from pdserve.policy.reservation import reserved_tokens
from pdserve.policy.routing import Decision, Kind, choose_pair, choose_prefill
from pdserve.router.fleet import Fleet
from pdserve.router.ledger import Entry
from pdserve.router.models import ServedModel
from pdserve.router.worker import Worker

log = structlog.get_logger(__name__)

REFUSAL_FIRST = 0.05  # seconds that a worker which refused is left alone; doubles
REFUSAL_MAX = 1.0
_RETRY_MIN, _RETRY_MAX = 0.1, 30.0  # seconds, bounds of what RetryInfo says
_EWMA = 0.2


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


@dataclass(slots=True, eq=False)
class Waiting:
    """One sequence that wants to be placed. `hashes` are its block hashes for each layout in the fleet; `decode` is the
    decode worker that holds a reservation for it, where only a prefill worker is wanted."""

    model: ServedModel
    tokens: int
    remaining: int
    priority: int
    replay: bool
    arrival: int
    hashes: Mapping[KVLayout, list[bytes]]
    refusals: Refusals
    decode: str | None = None
    reason: str = "not looked at yet"
    future: asyncio.Future[Assignment] | None = None


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


def queue_key(waiting: Waiting) -> tuple[bool, int, bool, int]:
    """Sorts a queue, first out first."""
    return waiting.decode is None, -waiting.priority, not waiting.replay, waiting.arrival


class Dispatcher:
    """Places waiting sequences whenever the fleet's view changes. Lives on one event loop; starts no task."""

    def __init__(self, fleet: Fleet, max_queue: int) -> None:
        self._fleet = fleet
        self._max_queue = max_queue
        self._queues: dict[str, list[Waiting]] = {}
        self._arrivals = itertools.count()
        self._woken = False
        self._interval: dict[str, float] = {}  # seconds between placements while there is a queue, smoothed
        self._last_placed: dict[str, float] = {}
        self._told: dict[str, str] = {}
        fleet.on_change.append(self.wake)

    def next_arrival(self) -> int:
        """A request's place in the order of arrival; it keeps it through all its tries."""
        return next(self._arrivals)

    def waiting(self, model: ServedModel) -> int:
        return len(self._queues.get(model.name, ()))

    def retry_after(self, model: ServedModel) -> float:
        """Seconds until a new request would probably be placed, at the pace of the latest placements."""
        expected = self._interval.get(model.name, 1.0) * (self.waiting(model) + 1)
        return min(_RETRY_MAX, max(_RETRY_MIN, expected))

    async def place(self, waiting: Waiting, timeout: float) -> Assignment:
        """Wait in the queue; the caller must `release` what it gets. Raises NoCapacity after `timeout` seconds, or at
        once when the queue is full, and InvalidRequest for what no worker of the fleet can ever take."""
        queue = self._queues.setdefault(waiting.model.name, [])
        if not waiting.replay and len(queue) >= self._max_queue:
            raise NoCapacity(
                f"{len(queue)} requests wait for {waiting.model.name} already", self.retry_after(waiting.model)
            )
        future: asyncio.Future[Assignment] = asyncio.get_running_loop().create_future()
        waiting.future = future
        bisect.insort(queue, waiting, key=queue_key)
        self.wake()
        try:
            async with asyncio.timeout(max(0.0, timeout)):
                return await future
        except BaseException as error:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().release()  # placed in the moment of giving up
                self.wake()
            if isinstance(error, TimeoutError):
                message = f"no placement within {timeout:.1f} s: {waiting.reason}"
                raise NoCapacity(message, self.retry_after(waiting.model)) from None
            raise
        finally:
            if waiting in queue:
                queue.remove(waiting)
                self.wake()  # it may have been the head

    def refused(self, refusals: Refusals, worker: Worker) -> None:
        """`worker` had no room after all; look again when the refusal has run out."""
        loop = asyncio.get_running_loop()
        seconds = refusals.refuse(worker, loop.time())
        loop.call_later(seconds + 0.001, self.wake)

    def wake(self) -> None:
        """Look at the queues soon: something changed. Cheap, and once for many calls."""
        if not self._woken and any(self._queues.values()):
            self._woken = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._woken = False
        for name, queue in self._queues.items():
            while queue:
                head = queue[0]
                try:
                    decision = self._decide(head)
                    outcome = self._assign(head, decision) if decision.placed else None
                except Exception as error:  # a bug must not stop the queue for everybody behind
                    queue.pop(0)
                    _fail(head, error)
                    continue
                if decision.kind is Kind.NEVER:
                    queue.pop(0)
                    _fail(head, InvalidRequest("prompt", decision.reason))
                    continue
                if outcome is None:
                    head.reason = decision.reason
                    self._tell(name, decision.reason)
                    break
                queue.pop(0)
                self._placed(name, bool(queue))
                if head.future is None or head.future.done():
                    outcome.release()
                else:
                    head.future.set_result(outcome)
            else:
                self._told.pop(name, None)

    def _decide(self, waiting: Waiting) -> Decision:
        refused = waiting.refusals.standing(asyncio.get_running_loop().time())
        request = PlacementRequest(
            tokens=waiting.tokens,
            remaining=waiting.remaining,
            held=self._fleet.held(waiting.model, waiting.hashes),
            excluded=refused | waiting.refusals.soft,
            was_refused=waiting.refusals.count > 0,
        )
        decision = self._choose(waiting, request)
        if not decision.placed and waiting.refusals.soft - refused:
            decision = self._choose(waiting, replace(request, excluded=refused))
        return decision

    def _choose(self, waiting: Waiting, request: PlacementRequest) -> Decision:
        view = self._fleet.view(waiting.model)
        return choose_pair(view, request) if waiting.decode is None else choose_prefill(view, request, waiting.decode)

    def _assign(self, waiting: Waiting, decision: Decision) -> Assignment | None:
        """Account for a decision. None: a worker went away between the view and now."""
        prefill = self._fleet.by_id(decision.prefill) if decision.prefill else None
        decode = self._fleet.by_id(decision.decode) if decision.decode else None
        if (decision.prefill and prefill is None) or (decision.decode and decode is None):
            return None
        assignment = Assignment(decision, prefill, decode, None, None)
        tokens = waiting.tokens
        if prefill is not None and prefill.layout is not None:
            blocks = prefill.layout.blocks_for(tokens)
            assignment.prefill_entry = prefill.ledger.add(tokens, tokens, blocks)
        if decode is not None and decode.layout is not None:
            lookahead = decode.snapshot.lookahead_tokens if decode.snapshot else 0
            blocks = decode.layout.blocks_for(reserved_tokens(tokens, waiting.remaining, lookahead))
            local = tokens if prefill is None else 0
            assignment.decode_entry = decode.ledger.add(tokens, local, blocks)
            held = decode.leading_blocks(waiting.hashes.get(decode.layout, []))
            assignment.decode_tokens_held = held * decode.layout.block_size
        return assignment

    def _placed(self, name: str, others_wait: bool) -> None:
        now = time.monotonic()
        before = self._last_placed.get(name)
        if before is not None and others_wait:
            interval = self._interval.get(name, now - before)
            self._interval[name] = interval + _EWMA * (now - before - interval)
        self._last_placed[name] = now

    def _tell(self, name: str, reason: str) -> None:
        """Say why a model's queue waits, once for each reason."""
        if self._told.get(name) != reason:
            self._told[name] = reason
            log.warning("queue_waits", model=name, reason=reason, waiting=len(self._queues[name]))


def _fail(waiting: Waiting, error: Exception) -> None:
    if waiting.future is not None and not waiting.future.done():
        waiting.future.set_exception(error)
