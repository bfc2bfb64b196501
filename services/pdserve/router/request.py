"""One request's life: placed, computed, streamed, and continued elsewhere when a worker lets it down.

A token that was shown is input from then on: each new try is given the prompt and everything shown so far, under a
new ticket, so that the client sees one answer whatever happens to the workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import structlog

from pdserve.core.errors import InvalidRequest, NoCapacity, Unavailable
from pdserve.core.sequence import EndReason, SequenceSpec
from pdserve.router.answer import Answer
from pdserve.router.attempt import Attempt
from pdserve.router.dispatch import Assignment, Dispatcher, Refusals, Waiting
from pdserve.router.events import Ended, Event, FirstToken, Lost, NewToken, PrefillFailed, Ready, Reserved
from pdserve.router.fleet import Fleet
from pdserve.router.stages import Timeline
from pdserve.router.validate import ResolvedRequest
from pdserve.router.worker import Worker
from pdserve.rpc.convert import sampling_to_proto
from pdserve.rpc.errors import DeadlineExceeded
from pdserve.v1 import inference_pb2

log = structlog.get_logger(__name__)

Send = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]
_BACKOFF = 0.05  # seconds before the second try in a row that got nowhere; doubles
_FINISH = {
    EndReason.STOP: inference_pb2.FINISH_REASON_STOP,
    EndReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a try ended without completing the answer. `refused`: nothing was spent, so it does not count as a try."""

    reason: str
    refused: bool = False
    worker: Worker | None = None


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
        max_replays: int,
        timeline: Timeline,
        traceparent: str = "",
    ) -> None:
        self.answer = Answer(resolved)
        self.timeline = timeline
        self.usage = inference_pb2.Usage(prompt_tokens=resolved.spec.prompt_len)
        self._resolved = resolved
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._send = send
        self._deadline = deadline
        self._queue_deadline = queue_deadline
        self._max_replays = max_replays
        self._traceparent = traceparent
        self._refusals = Refusals()
        self._arrival = dispatcher.next_arrival()
        self._tries = 0

    async def run(self) -> inference_pb2.Finish:
        """Send PromptInfo, the outputs and the finish, which is also returned. Raises PdserveError."""
        await self._send(inference_pb2.GenerateResponse(prompt=self._prompt_info()))
        fruitless = 0
        while self.answer.ending is None:
            shown = self.answer.num_tokens
            waiting = await self._waiting()
            assignment = await self._dispatcher.place(waiting, self._queue_deadline - self._now())
            failure = await self._try(assignment)
            self._dispatcher.wake()  # what it held is free
            if failure is None:
                break
            await self._note(failure, waiting, fruitless)
            if failure.refused:
                continue
            fruitless = 0 if self.answer.num_tokens > shown else fruitless + 1
            if fruitless > self._max_replays:
                raise Unavailable(f"{fruitless} tries in a row failed, the last one because {failure.reason}")
        finish = self._finish()
        await self._send(inference_pb2.GenerateResponse(finish=finish))
        return finish

    async def _waiting(self) -> Waiting:
        resolved, tokens = self._resolved, tuple(self.answer.token_ids)
        return Waiting(
            model=resolved.model,
            tokens=len(tokens),
            remaining=resolved.spec.params.max_tokens - self.answer.num_tokens,
            priority=resolved.spec.priority,
            replay=self._tries > 0,
            arrival=self._arrival,
            hashes=await self._fleet.hash_prompt(resolved.model, tokens, resolved.spec.cache_salt),
            refusals=self._refusals,
        )

    async def _try(self, assignment: Assignment) -> Failure | None:
        """One try, to its end. None: the answer is complete."""
        self._tries += 1
        spec = self._spec()
        log.debug("dispatched", decision=assignment.decision.kind, reason=assignment.decision.reason)
        try:
            async with Attempt(assignment, spec, 1) as attempt:
                self.timeline.dispatch(attempt.started)
                return await _Follower(self, attempt, len(spec.token_ids)).follow()
        finally:
            assignment.release()

    def _spec(self) -> SequenceSpec:
        return replace(
            self._resolved.spec,
            token_ids=tuple(self.answer.token_ids),
            time_remaining=max(0.001, self._deadline - self._now()),
            traceparent=self._traceparent,
        )

    async def _note(self, failure: Failure, waiting: Waiting, fruitless: int) -> None:
        """Count a failed try, and see to it that the next one is neither the same nor at once."""
        if failure.refused and failure.worker is not None:
            self._dispatcher.refused(waiting, failure.worker)
        if self.answer.num_tokens or not failure.refused:
            self.usage.replays += 1
        log.info("try_failed", reason=failure.reason, refused=failure.refused, shown_tokens=self.answer.num_tokens)
        if failure.refused:
            return
        self._refusals.soft = {failure.worker.worker_id} if failure.worker is not None else set()
        if fruitless:
            # The wait ends early when the fleet changes, as it does when a worker is found dead.
            await self._fleet.wait_membership(_BACKOFF * 2.0**fruitless)

    async def send_output(self) -> None:
        """Send what is new. Waits for a slow client, and meanwhile events gather for the next message."""
        output = self.answer.take()
        if output is not None:
            await self._send(inference_pb2.GenerateResponse(output=output))

    def _prompt_info(self) -> inference_pb2.PromptInfo:
        spec = self._resolved.spec
        sampling, stopping = sampling_to_proto(spec.params)
        stopping.stop.extend(self._resolved.stops)
        return inference_pb2.PromptInfo(
            request_id=spec.request_id,
            model=self._resolved.model.name,
            prompt_tokens=spec.prompt_len,
            sampling=sampling,
            stopping=stopping,
        )

    def _finish(self) -> inference_pb2.Finish:
        ending = self.answer.ending
        assert ending is not None
        self.usage.completion_tokens = self.answer.num_tokens
        self.usage.cached_tokens = min(self.usage.cached_tokens, self.usage.prompt_tokens)
        self.usage.stages.CopyFrom(self.timeline.stages())
        finish = inference_pb2.Finish(reason=_FINISH[ending.reason], usage=self.usage)
        if ending.stop_string is not None:
            finish.stop_string = ending.stop_string
        elif ending.stop_token_id is not None:
            finish.stop_token_id = ending.stop_token_id
        return finish

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class _Follower:
    """Reads one try's events in order of arrival and gives the answer its tokens in order of position."""

    def __init__(self, run: RequestRun, attempt: Attempt, given: int) -> None:
        self._run = run
        self._attempt = attempt
        self._given = given
        self._next = given
        self._early: dict[int, tuple[int, inference_pb2.Token]] = {}
        self._ended: EndReason | None = None
        self._ready = False

    async def follow(self) -> Failure | None:
        run = self._run
        while True:
            failure = None
            for stamp, event in await self._attempt.next_events():
                failure = self._take(stamp, event)
                if failure is not None or run.answer.ending is not None:
                    break
            await run.send_output()
            if run.answer.ending is not None:
                return None
            if failure is not None:
                return failure

    def _take(self, stamp: int, event: Event) -> Failure | None:
        run, assignment = self._run, self._attempt.assignment
        match event:
            case NewToken(position, token):
                self._keep(position, stamp, token)
            case FirstToken(position, token):
                self._keep(position, stamp, token)
                self._first_token(event)
            case Reserved(tokens_held):
                self._reserved(stamp, tokens_held)
            case Ready(kv_bytes):
                self._ready = True
                run.usage.kv_transfer_bytes += kv_bytes
                if assignment.prefill is not None and not run.timeline.second:
                    run.timeline.ready = stamp
            case Ended(reason, detail):
                if not reason.answer_complete:
                    return _ended(reason, detail, assignment.decode, self._next > self._given)
                self._ended = reason
            case PrefillFailed(error):
                # With the KV complete over there and the first token here, the prefill worker owes nothing.
                if not (self._ready and self._next > self._given):
                    return _prefill_failed(error, assignment.prefill)
            case Lost(reason):
                return Failure(reason, worker=assignment.decode)
        self._in_order()
        return None

    def _keep(self, position: int, stamp: int, token: inference_pb2.Token) -> None:
        if position >= self._next:  # a token that was handed over already does not count twice
            self._early[position] = stamp, token

    def _in_order(self) -> None:
        """Hand over the tokens that follow on what is there: the second may overtake the first."""
        run = self._run
        while run.answer.ending is None and self._next in self._early:
            stamp, token = self._early.pop(self._next)
            self._name_workers()
            self._next += 1
            run.answer.add(token)
            run.timeline.token(stamp, run.answer.num_tokens)
        if run.answer.ending is None and self._ended is not None and not self._early and self._next > self._given:
            run.answer.ended_by_worker(self._ended)

    def _name_workers(self) -> None:
        usage, assignment = self._run.usage, self._attempt.assignment
        prefill, decode = assignment.prefill, assignment.decode
        if not usage.prefill_worker:
            computed = prefill or decode
            usage.prefill_worker = computed.worker_id if computed else ""
        if decode is not None and (prefill is None or self._next > self._given):
            usage.decode_worker = decode.worker_id

    def _first_token(self, event: FirstToken) -> None:
        usage = self._run.usage
        if not self._run.answer.num_tokens:
            usage.cached_tokens, usage.blocks_reused = event.cached_tokens, event.blocks_reused
        if event.end is not None and event.end.answer_complete:
            self._ended = event.end

    def _reserved(self, stamp: int, tokens_held: int) -> None:
        run, decode = self._run, self._attempt.assignment.decode
        if run.answer.num_tokens:
            return
        run.timeline.reserved = stamp
        if self._attempt.assignment.prefill is None and decode is not None and decode.layout is not None:
            run.usage.cached_tokens = tokens_held
            run.usage.blocks_reused = tokens_held // decode.layout.block_size


def _ended(reason: EndReason, detail: str, worker: Worker | None, progress: bool) -> Failure:
    """What a decode worker's end means for the request. Raises what no other worker would do better."""
    if reason is EndReason.INVALID:
        raise InvalidRequest("request", detail or "the worker cannot take it")
    if reason is EndReason.DEADLINE:
        raise DeadlineExceeded("the deadline passed")
    refused = reason is EndReason.NO_CAPACITY or (reason is EndReason.DRAINING and not progress)
    return Failure(f"{reason}: {detail}" if detail else str(reason), refused, worker)


def _prefill_failed(error: Exception, worker: Worker | None) -> Failure:
    """The same for a prefill call that failed."""
    if isinstance(error, InvalidRequest | DeadlineExceeded):
        raise error
    return Failure(str(error), isinstance(error, NoCapacity), worker)
