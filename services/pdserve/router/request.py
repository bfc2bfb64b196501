"""One request's life: placed, computed, streamed, and continued elsewhere when a worker lets it down.

A token that was shown is input from then on: whoever goes on is given the prompt and everything shown so far, so that
the client sees one answer whatever happens to the workers. Where only the prefill half of a try failed, its reservation
is rearmed (see `follow`); else the next try has a new ticket.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import grpc
import structlog

from pdserve.core.errors import Unavailable
from pdserve.core.sequence import EndReason, SequenceSpec
from pdserve.policy.draining import Leave
from pdserve.policy.fleet import Target
from pdserve.router.answer import Answer
from pdserve.router.assignment import Assignment
from pdserve.router.dispatch import Dispatcher
from pdserve.router.fleet import Fleet
from pdserve.router.follow import Failure, Follower
from pdserve.router.measure import Measure
from pdserve.router.tasks import meanwhile
from pdserve.router.ticket import Ticket
from pdserve.router.validate import ResolvedRequest
from pdserve.router.waiting import Account, Refusals, Waiting, Wishes
from pdserve.router.worker import Worker
from pdserve.rpc.convert import sampling_to_proto
from pdserve.rpc.errors import DeadlineExceeded, RpcError
from pdserve.telemetry import names
from pdserve.telemetry.tracing import record_span
from pdserve.v1 import inference_pb2

log = structlog.get_logger(__name__)

Send = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]
LONG_ANSWER = 512  # tokens; a millisecond or so of detokenizing, above which a thread does it
_BACKOFF, _BACKOFF_MAX = 0.1, 2.0  # seconds after the second failure in a row that got nowhere; doubles up to
_FINISH = {
    EndReason.STOP: inference_pb2.FINISH_REASON_STOP,
    EndReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


class RequestRun:
    """Runs one resolved request to its end, sending responses through `send`. `deadline` is in the loop's time."""

    def __init__(
        self,
        resolved: ResolvedRequest,
        fleet: Fleet,
        dispatcher: Dispatcher,
        send: Send,
        *,
        deadline: float,
        queue_deadline: float,
        unread_seconds: float,
        max_replays: int,
        max_worker_deaths: int,
        leave_rule: Leave = Leave.NEEDED,
        measure: Measure,
        traceparent: str = "",
        wishes: Wishes,
    ) -> None:
        self.answer = Answer(resolved)
        self.finish: inference_pb2.Finish | None = None  # once it is being sent
        self.measure = measure
        self.timeline, self.usage = measure.timeline, measure.usage
        self.usage.prompt_tokens = resolved.spec.prompt_len
        self._resolved = resolved
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._send = send
        self._deadline = deadline
        self._queue_deadline = queue_deadline
        self._unread_seconds = unread_seconds
        self._max_replays = max_replays
        self._max_worker_deaths = max_worker_deaths
        self.leave_rule = leave_rule
        self._traceparent = traceparent
        self._wishes = wishes
        self._refusals, self._account = Refusals(), Account()
        self._arrived, self._arrival = self._now(), dispatcher.next_arrival()
        self._tries = 0
        self._lost: list[str] = []  # workers that died under it, one by one
        self._fruitless = 0  # failures in a row without a token in between
        self._failed = False  # a failure since the try began makes the next one a replay; a rearm goes on with the same
        self._shown = 0  # tokens at the latest failure
        self._told: asyncio.Future[None]  # PromptInfo is sent; the first try begins meanwhile
        self._try_began = 0  # wall clock, nanoseconds; or when its latest failure was counted

    async def run(self) -> inference_pb2.Finish:
        """Send PromptInfo, the outputs and the finish, which is also returned. Raises PdserveError."""
        await self._resume()
        try:
            async with meanwhile(self._tell_prompt()) as self._told:
                await self._until_complete()
        finally:
            self._dispatcher.answered(
                self._resolved.model,
                self._wishes,
                self._resolved.spec.priority,
                self.new_tokens,
                self._account,
                whole=self.answer.ending is not None and not self._resolved.resumed,
            )
        finish = self.finish = self._finish()
        await self._tell(inference_pb2.GenerateResponse(finish=finish))
        return finish

    @property
    def new_tokens(self) -> int:
        """Of the answer, those that this run has added to what the client had."""
        return self.answer.num_tokens - len(self._resolved.resumed)

    @property
    def remaining(self) -> int:
        """How many more tokens the answer may have."""
        return self._resolved.spec.params.max_tokens - self.answer.num_tokens

    async def _resume(self) -> None:
        """Take up what the client has of the answer. Raises InvalidRequest."""
        tokens = self._resolved.resumed
        if len(tokens) < LONG_ANSWER:
            self.answer.resume(tokens)
        else:
            await asyncio.to_thread(self.answer.resume, tokens)

    async def _until_complete(self) -> None:
        while self.answer.ending is None:
            assignment = await self._place(await self._waiting(), self._queue_deadline)
            self.usage.replays += self._failed
            self._failed = False
            failure = await self._try(assignment)
            self._dispatcher.wake()  # what it held is free
            if failure is None:
                break
            if not failure.counted:
                self.count(failure)
            await self._back_off(failure)

    async def _waiting(self, decode: str | None = None, leaves: str | None = None) -> Waiting:
        resolved, tokens = self._resolved, tuple(self.answer.token_ids)
        return Waiting(
            model=resolved.model,
            tokens=len(tokens),
            remaining=self.remaining,
            priority=resolved.spec.priority,
            replay=self._tries > 0,
            resumed=bool(resolved.resumed),
            arrived=self._arrived,
            arrival=self._arrival,
            hashes=await self._fleet.hash_prompt(resolved.model, tokens, resolved.spec.cache_salt),
            refusals=self._refusals,
            wishes=self._wishes,
            account=self._account,
            log=self.measure.decisions,
            decode=decode,
            leaves=leaves,
        )

    async def _try(self, assignment: Assignment) -> Failure | None:
        """One try, to its end. None: the answer is complete."""
        self._tries, self._try_began = self._tries + 1, time.time_ns()
        try:
            async with Ticket(assignment, self.spec(), self.ticket_name()) as ticket:
                handover = assignment.prefill is not None and assignment.decode is not None
                self.timeline.dispatch(ticket.started, handover=handover)
                follower = Follower(self, ticket)
                try:
                    return await follower.follow()
                finally:
                    await follower.end()
        finally:
            assignment.release()

    def spec(self) -> SequenceSpec:
        """What a worker that starts now is given."""
        return replace(
            self._resolved.spec,
            token_ids=tuple(self.answer.token_ids),
            time_remaining=max(0.001, self._deadline - self._now()),
            traceparent=self._traceparent,
            itl_target=self._wishes.targets.itl if Target.ITL in self._wishes.stated else None,
        )

    async def place_prefill(self, failure: Failure, decode: Worker, until: float) -> Assignment:
        """Wait in the queue, up to `until`, for a prefill worker to go on where one has failed. Raises NoCapacity."""
        await self._back_off(failure)
        waiting = await self._waiting(decode.worker_id)
        return await self._place(waiting, min(until, self._queue_deadline))

    async def place_move(self, leaving: Worker, until: float) -> Assignment:
        """Wait in the queue, up to `until`, for another decode worker to go on with what runs on `leaving`. Raises
        NoCapacity."""
        waiting = await self._waiting(leaves=leaving.worker_id)
        return await self._place(waiting, min(until, self._queue_deadline))

    async def _place(self, waiting: Waiting, until: float) -> Assignment:
        began = self._now()
        assignment = await self._dispatcher.place(waiting, until - began)
        self.timeline.queued(self._now() - began)
        for worker in (assignment.prefill, assignment.decode):
            if worker is not None:
                self.measure.workers[worker.worker_id] = None
        return assignment

    def ticket_name(self) -> str:
        """One that nobody may guess."""
        return self._fleet.chance.randbytes(16).hex()

    def avoid(self, worker: Worker) -> None:
        """Keep away from a worker for a moment that did not take it over."""
        self._dispatcher.refused(self._refusals, worker)

    def trace_move(self, began: int, attributes: dict[str, str | int], problem: str) -> None:
        """A span for a move, from its wall-clock beginning, in nanoseconds, until now."""
        record_span(names.SPAN_HAND_OFF, began, time.time_ns(), self._traceparent, attributes, problem)

    def count(self, failure: Failure) -> None:
        """Count a failure, and see to it that what follows is not the same again. Raises Unavailable after too many."""
        shown = self.new_tokens
        if failure.refused and failure.worker is not None:
            self._dispatcher.refused(self._refusals, failure.worker)
            self.measure.refused()
        if shown or not failure.refused:
            self._failed = True
        log.info("try_failed", reason=failure.reason, refused=failure.refused, shown_tokens=shown)
        self._trace(failure)
        if failure.refused:
            return
        self._count_death(failure)
        self._refusals.soft = {failure.worker.worker_id} if failure.worker is not None else set()
        self._fruitless = 0 if shown > self._shown else self._fruitless + 1
        self._shown = shown
        if self._fruitless > self._max_replays:
            raise Unavailable(f"{self._fruitless} tries in a row failed, the last one because {failure.reason}")

    def _count_death(self, failure: Failure) -> None:
        """A request that workers die of must not go through the whole fleet, however far each of them got with it.
        Raises RpcError, which no client repeats."""
        worker = failure.worker
        if worker is None or worker.draining or not (failure.lost or not worker.connected):
            return
        self._lost.append(worker.worker_id)
        if len(self._lost) >= self._max_worker_deaths:
            log.error("request_stopped", lost=self._lost, shown_tokens=self.answer.num_tokens)
            message = f"workers were lost {len(self._lost)} times while they had this request; it is not tried again"
            raise RpcError(grpc.StatusCode.INTERNAL, message)

    def _trace(self, failure: Failure) -> None:
        """A span for what came to nothing: the workers' own may have gone with them."""
        attributes: dict[str, str | int] = {names.ATTEMPT: self._tries, names.TOKENS: self.answer.num_tokens}
        if failure.worker is not None:
            attributes[names.WORKER] = failure.worker.worker_id
        now = time.time_ns()
        record_span(names.SPAN_TRY, self._try_began, now, self._traceparent, attributes, failure.reason)
        self._try_began = now

    async def _back_off(self, failure: Failure) -> None:
        """Don't go on at once where going on failed again and again."""
        if self._fruitless > 1 and not failure.refused:
            # The wait ends early when the fleet changes, as it does when a worker is found dead.
            await self._fleet.wait_membership(min(_BACKOFF_MAX, _BACKOFF * 2.0 ** min(self._fruitless - 2, 10)))

    async def send_output(self) -> None:
        """Send what is new. Waits for a slow client, and meanwhile events gather for the next message."""
        output = self.answer.take()
        if output is not None:
            await self._tell(inference_pb2.GenerateResponse(output=output))

    async def _tell(self, response: inference_pb2.GenerateResponse) -> None:
        """Send `response`. One that is never taken stays marked: the wait that ended the request was for its client.
        Raises DeadlineExceeded where it is not taken in time: what was not read would gather for ever."""
        self.timeline.sending = True
        try:
            async with asyncio.timeout(self._unread_seconds):
                await self._told
                await self._send(response)
        except TimeoutError:
            raise DeadlineExceeded(f"the client read nothing for {self._unread_seconds:g} s") from None
        self.timeline.sending = False

    async def _tell_prompt(self) -> None:
        """Send PromptInfo."""
        await asyncio.sleep(0)  # behind the dispatch, where that needs no waiting: a token waits for that
        spec = self._resolved.spec
        sampling, stopping = sampling_to_proto(spec.params)
        stopping.stop.extend(self._resolved.stops)
        info = inference_pb2.PromptInfo(
            request_id=spec.request_id,
            model=self._resolved.model.name,
            prompt_tokens=spec.prompt_len,
            sampling=sampling,
            stopping=stopping,
        )
        await self._send(inference_pb2.GenerateResponse(prompt=info))

    def _finish(self) -> inference_pb2.Finish:
        ending = self.answer.ending
        assert ending is not None
        self.usage.completion_tokens = self.answer.num_tokens
        self.usage.cached_tokens = min(self.usage.cached_tokens, self.usage.prompt_tokens)
        self.usage.stages.CopyFrom(self.timeline.told())
        finish = inference_pb2.Finish(reason=_FINISH[ending.reason], usage=self.usage)
        if ending.stop_string is not None:
            finish.stop_string = ending.stop_string
        elif ending.stop_token_id is not None:
            finish.stop_token_id = ending.stop_token_id
        return finish

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
