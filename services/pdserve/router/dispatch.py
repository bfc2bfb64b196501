"""The waiting queue: who is placed next, and where. Decisions bind late; workers keep only short queues.

Per model the order is `Waiting.rank`, fair across tenants (see policy.fairness). A pass over the queue asks the policy
about each in turn (see policy.queueing): who has to wait for room is overtaken by nobody, so that a big request does
not starve; who waits for one prefill worker, or insists on something, is overtaken by those that need not wait.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from types import TracebackType

import structlog

from pdserve.core.errors import InvalidRequest, NoCapacity, Unavailable
from pdserve.policy.admission import RETRY_MAX
from pdserve.policy.disaggregation import Rules
from pdserve.policy.fairness import OUTPUT_WEIGHT
from pdserve.policy.fleet import FleetView, PlacementRequest
from pdserve.policy.forecast import Ahead
from pdserve.policy.queueing import least_work, plan_pass
from pdserve.policy.routing import Decision, Kind, choose_decode, choose_pair, choose_prefill
from pdserve.router.assignment import Assignment, assign
from pdserve.router.conversations import Conversations
from pdserve.router.fleet import Fleet
from pdserve.router.models import ServedModel
from pdserve.router.waiting import Account, ModelQueue, Refusals, Waiting, Wishes, fresh_class
from pdserve.router.worker import Worker

log = structlog.get_logger(__name__)

AT_ONCE = 32  # requests that one pass looks at; the event loop has others to serve
REST = 0.005  # seconds after a pass that nobody left the queue in, before the next one
GOING_ON = 2  # times max_queue may wait where answers that another router began are among them
NOBODY = Ahead()
DOWN_RETRY = 1.0  # seconds that whoever is refused since nobody is up is told to wait at least


class Dispatcher:
    """Places waiting sequences whenever the fleet's view changes. Lives on one event loop; starts no task."""

    def __init__(self, fleet: Fleet, max_queue: int, rules: Rules = Rules()) -> None:  # noqa: B008  immutable
        self._fleet = fleet
        self._max_queue = max_queue
        self._rules = rules
        self._queues: defaultdict[str, ModelQueue] = defaultdict(ModelQueue)
        self._conversations = Conversations()
        self._arrivals = itertools.count()
        self._woken: asyncio.Handle | None = None
        self._looked = False  # in this turn of the event loop, for one that had come alone
        self._rest_until = 0.0
        fleet.on_change.append(self.wake)

    def next_arrival(self) -> int:
        """A request's place in the order of arrival; it keeps it through all its tries."""
        return next(self._arrivals)

    def waiting(self, model: ServedModel) -> int:
        return len(self._queues[model.name].waiting)

    def ahead(self, model: ServedModel, wishes: Wishes, priority: int) -> Ahead:
        """What waits for `model` and would be placed before a new request of that tenant and priority."""
        waiting = self._queues[model.name].waiting
        if not waiting:
            return NOBODY
        due = asyncio.get_running_loop().time() + wishes.targets.ttft
        rank = (*fresh_class(self._counts(priority)), True, due, math.inf)
        work, count = waiting.ahead(wishes.tenant, rank)
        return Ahead(work.tokens, work.squares, count)

    def expected(self, model: ServedModel) -> int:
        """Tokens of an answer, as they were lately; 0: not known yet."""
        return round(self._queues[model.name].pace.answer)

    def answered(
        self, model: ServedModel, wishes: Wishes, priority: int, tokens: int, account: Account, *, whole: bool
    ) -> None:
        """A request, of that `account`, got so many tokens in all, and that was the `whole` answer."""
        queue = self._queues[model.name]
        if whole:
            queue.pace.answered(tokens)
        cost, account.answer = OUTPUT_WEIGHT * tokens - account.answer, 0
        queue.waiting.charge(wishes.tenant, fresh_class(self._counts(priority)), cost)

    def retry_after(self, model: ServedModel) -> float:
        """Seconds until a new request would probably be placed, at the pace of the latest placements."""
        return self._queues[model.name].pace.retry_after(self.waiting(model))

    async def place(self, waiting: Waiting, timeout: float) -> Assignment:
        """Wait in the queue; the caller must `release` what it gets. Raises NoCapacity after `timeout` seconds, or at
        once when the queue is full, InvalidRequest for what no worker of the fleet can ever take, and Unavailable where
        nobody is up for it and the rules say not to wait."""
        queue, loop = self._queues[waiting.model.name], asyncio.get_running_loop()
        limit = self._max_queue * (GOING_ON if waiting.resumed else 1)
        if not waiting.replay and len(queue.waiting) >= limit:
            raise NoCapacity(
                f"{len(queue.waiting)} requests wait for {waiting.model.name} already", self.retry_after(waiting.model)
            )
        future: asyncio.Future[Assignment] = loop.create_future()
        waiting.future, waiting.queued = future, loop.time()
        waiting.priority, waiting.expected = self._counts(waiting.priority), self.expected(waiting.model)
        request = PlacementRequest(waiting.tokens, waiting.remaining, self._fleet.held(waiting.model, waiting.hashes))
        queue.add(waiting, least_work(request, self._fleet.view(waiting.model)))
        if self._looked or len(queue.waiting) > 1:  # who comes with others goes by rank
            self.wake(now=True)
        else:  # alone, at once
            self._looked = True
            loop.call_soon(self._look_again)
            if not self._look(waiting.model.name, queue):
                self._rest_until = loop.time() + REST
        if future.done():
            return future.result()
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
            if waiting in queue.waiting:
                queue.leave(waiting, served=False, now=loop.time())
                self.wake()  # it may have been the head

    def refused(self, refusals: Refusals, worker: Worker) -> None:
        """`worker` had no room after all; look again when the refusal has run out."""
        loop = asyncio.get_running_loop()
        seconds = refusals.refuse(worker, loop.time())
        loop.call_later(seconds + 0.001, self.wake)

    def wake(self, *, now: bool = False) -> None:
        """Look at the queues soon: something changed. Cheap, and once for many calls. Not `now`: after a pass that
        placed nobody there is a rest, since fleets report far more often than they change."""
        if not any(queue.waiting for queue in self._queues.values()):
            return
        loop = asyncio.get_running_loop()
        rest = 0.0 if now else self._rest_until - loop.time()
        if self._woken is not None and isinstance(self._woken, asyncio.TimerHandle) and rest <= 0:
            self._woken.cancel()
            self._woken = None
        if self._woken is None:
            self._woken = loop.call_later(rest, self._dispatch) if rest > 0 else loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._woken, went = None, False
        for name, queue in self._queues.items():
            went |= self._look(name, queue)
        if went:
            self._rest_until = 0.0
            self.wake()  # a pass ends after so many
        else:
            self._rest_until = asyncio.get_running_loop().time() + REST

    def _look_again(self) -> None:
        self._looked = False

    def _look(self, name: str, queue: ModelQueue) -> bool:
        """One pass over a queue; whether anybody left it."""
        if count := len(queue.waiting):
            with _Guard(self, queue):
                self._pass(name, queue)
        return len(queue.waiting) < count

    def _pass(self, name: str, queue: ModelQueue) -> None:
        """Look at the first ones of a queue, and place whom the policy says."""
        requests: dict[Waiting, PlacementRequest] = {}
        waits = ""
        model = next(iter(queue.waiting)).model

        def request_of(item: Waiting) -> PlacementRequest:
            requests[item] = PlacementRequest(item.tokens, item.remaining)
            with _Guard(self, queue, item):
                requests[item] = self._request(item, queue)
            return requests[item]

        def choose(item: Waiting, view: FleetView, request: PlacementRequest) -> Decision:
            with _Guard(self, queue, item):
                if item in queue.waiting:
                    return self._choose(item, view, request)
            return Decision(Kind.NEVER, item.reason)

        plan = plan_pass(
            queue.waiting.first(AT_ONCE),
            lambda: self._fleet.view(model),
            request_of,
            choose,
            terms_of=lambda item: item.terms,
            deferred=queue.deferred,
            overtaken=queue.overtaken,
            now=asyncio.get_running_loop().time(),
        )
        for item, decision in plan:
            if item not in queue.waiting:
                continue
            with _Guard(self, queue, item):
                item.log.note(decision, requests[item], time.time_ns())
                item.reason = decision.reason
                if decision.placed:
                    assignment = self._carry_out(item, decision, requests[item])
                    if assignment is None:
                        break  # a worker is gone, and the view is about to be another one
                    self.leave(queue, item, assignment)
                elif decision.kind is Kind.NEVER:
                    self.leave(queue, item, InvalidRequest("prompt", decision.reason))
                elif decision.kind is Kind.DOWN:
                    seconds = min(RETRY_MAX, max(DOWN_RETRY, self._rules.no_worker_seconds))
                    self.leave(queue, item, Unavailable(decision.reason, seconds))
                else:
                    waits = waits or decision.reason
                    self._note_down(queue, item, decision)
        if requests:  # else everybody waits for what they waited for before
            self._tell(name, queue, waits)

    def _counts(self, priority: int) -> int:
        """What a priority that a client names counts as."""
        return min(priority, self._rules.max_priority)

    def _request(self, item: Waiting, queue: ModelQueue) -> PlacementRequest:
        now, wishes = asyncio.get_running_loop().time(), item.wishes
        since = queue.down_since
        return PlacementRequest(
            tokens=item.tokens,
            remaining=item.remaining,
            held=self._fleet.held(item.model, item.hashes),
            excluded=item.refusals.standing(now) | item.refusals.soft,
            was_refused=item.refusals.count > 0,
            expected=round(queue.pace.answer),
            near=self._conversations.near(wishes.session),
            targets=wishes.targets,
            stated=wishes.stated,
            waited=now - item.arrived,
            down_for=0.0 if since is None else now - max(since, item.queued),
            overtaken=queue.overtaken.get(item, 0),
            draw=item.arrival,
            now=now,
        )

    def _choose(self, item: Waiting, view: FleetView, request: PlacementRequest) -> Decision:
        decision = self._ask(item, view, request)
        if decision.placed or not item.refusals.soft:
            return decision
        hard = item.refusals.standing(asyncio.get_running_loop().time())
        return self._ask(item, view, replace(request, excluded=hard)) if item.refusals.soft - hard else decision

    def _ask(self, item: Waiting, view: FleetView, request: PlacementRequest) -> Decision:
        if item.decode is not None:
            return choose_prefill(view, request, item.decode, self._rules)
        if item.leaves is not None:
            return choose_decode(view, request, item.leaves)
        return choose_pair(view, request, self._rules)

    def _carry_out(self, item: Waiting, decision: Decision, request: PlacementRequest) -> Assignment | None:
        assignment = assign(self._fleet, self._fleet.view(item.model), decision, request)
        if assignment is not None:
            self._conversations.note(item.wishes.session, assignment)
        return assignment

    def leave(self, queue: ModelQueue, item: Waiting, outcome: Assignment | Exception) -> None:
        """The wait of `item` is over."""
        now = asyncio.get_running_loop().time()
        queue.leave(item, served=isinstance(outcome, Assignment), now=now)
        open_future = item.future if item.future is not None and not item.future.done() else None
        if isinstance(outcome, Assignment):
            if open_future is None:
                outcome.release()
            else:
                open_future.set_result(outcome)
        elif open_future is not None:
            open_future.set_exception(outcome)

    def _note_down(self, queue: ModelQueue, item: Waiting, decision: Decision) -> None:
        """Remember since when nobody is up, and look again when that has been for long enough. Whoever looks for one to
        fill its reservation, or to take it over, knows of workers of one role only."""
        if item.decode is not None or item.leaves is not None:
            return
        loop, look = asyncio.get_running_loop(), queue.down_look
        if not decision.down:
            queue.down_since = None
            return
        if queue.down_since is None:
            queue.down_since = loop.time()
        at = max(queue.down_since, item.queued) + self._rules.no_worker_seconds + 0.001
        if look is None or look.when() != at:
            if look is not None:
                look.cancel()
            queue.down_look = loop.call_at(at, self.wake)

    def _tell(self, name: str, queue: ModelQueue, reason: str) -> None:
        """Say why a model's queue waits, once for each reason."""
        kind = reason.split(":")[0]  # figures change all the time
        if kind and queue.told != kind:
            log.warning("queue_waits", model=name, reason=reason, waiting=len(queue.waiting))
        queue.told = kind


@dataclass(slots=True)
class _Guard:
    """A scope in which a bug must stop neither other models nor whoever is behind: it ends the wait of `item`, if there
    is one. A class, since a pass enters several for each request, and a generator takes five times as long."""

    dispatcher: Dispatcher
    queue: ModelQueue
    item: Waiting | None = None

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        log.error("decision_failed", error=repr(error), exc_info=error)
        if self.item is not None:
            self.item.reason = repr(error)
            self.dispatcher.leave(self.queue, self.item, error)
        return True
