"""PrefillService: routers' sessions, and in them attempts: a prompt each, from admission to the decode's commit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio
import structlog

from pdserve.core.errors import InvalidRequest, NoCapacity, PdserveError, Unavailable
from pdserve.core.sequence import EndReason
from pdserve.engine.outputs import Ended
from pdserve.prefill import spans
from pdserve.prefill.call import Call, First, accepted_response, committed_response, failed_response, first_response
from pdserve.rpc.convert import spec_from_proto
from pdserve.rpc.endpoint import check_endpoint
from pdserve.rpc.errors import DeadlineExceeded, RpcError
from pdserve.rpc.server import Service
from pdserve.telemetry import names
from pdserve.telemetry.logs import log_request
from pdserve.telemetry.tracing import fail_span, start_span, traceparent_of
from pdserve.v1 import prefill_pb2, prefill_pb2_grpc
from pdserve.worker.front import WorkerFront
from pdserve.worker.messages import CancelTicket, KvCommitted, StartPrefill, StepDone, TicketMessage
from pdserve.worker.router_session import RouterSession, attend

log = structlog.get_logger(__name__)

OLDER_PATIENCE = 5.0  # seconds until the engine has let go of a ticket's older attempt
LAST_WORDS = 5.0  # seconds, for a router that lags behind
# Attempts at a time in one session: as many as a connection may have calls. They hold a prompt each.
MAX_ATTEMPTS = 4096
_RETRY_AFTER = 1.0  # seconds that one more is told to wait
_LATE = "the request's time is over"


@dataclass(eq=False, slots=True)
class _Session(RouterSession):
    """A router's, with what runs of its attempts, by ticket and number."""

    attempts: dict[tuple[str, int], asyncio.Task[None]] = field(default_factory=dict)


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """pdserve.v1.PrefillService over a WorkerFront."""

    def __init__(self, front: WorkerFront) -> None:
        self._front = front
        self._calls: dict[str, Call] = {}
        self._sessions: set[_Session] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def PrefillSession(  # type: ignore[override]  # a coroutine that reads and writes by itself
        self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        session = _Session()

        def reading() -> Coroutine[Any, Any, None]:
            self._sessions.add(session)
            return self._read(session, context)

        kinds = prefill_pb2.PrefillSessionRequest, prefill_pb2.PrefillSessionResponse
        try:
            await attend(session, context, kinds, self._front, reading)
        finally:
            await self._end_session(session)

    async def _read(self, session: _Session, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while isinstance(request := await context.read(), prefill_pb2.PrefillSessionRequest):
            match request.WhichOneof("command"):
                case "prefill":
                    self._begin(session, request.prefill)
                case "cancel":
                    task = session.attempts.get((request.cancel.ticket, request.cancel.attempt))
                    if task is not None:
                        task.cancel()
                case "hello":
                    raise InvalidRequest("hello", "a second hello in one session")
                case _:
                    raise InvalidRequest("command", "unknown to this version")

    def _begin(self, session: _Session, request: prefill_pb2.PrefillRequest) -> None:
        key = request.ticket, request.attempt
        if key in session.attempts:
            session.put(failed_response(request, RpcError(grpc.StatusCode.ABORTED, "this attempt is here already")))
            return
        if len(session.attempts) >= MAX_ATTEMPTS:
            session.put(
                failed_response(request, NoCapacity(f"this session has {MAX_ATTEMPTS} prompts already", _RETRY_AFTER))
            )
            return
        task = asyncio.create_task(self._attempt(session, request), name=f"prefill {request.ticket[:8]}")
        session.attempts[key] = task
        # Not at the end of the task's own code: one that is cancelled in the tick of its beginning never runs any.
        task.add_done_callback(lambda _: session.attempts.pop(key, None))

    async def _end_session(self, session: _Session) -> None:
        session.close()
        self._sessions.discard(session)
        if tasks := list(session.attempts.values()):
            log.info("session_ended", router_id=session.router_id, cancelled=len(tasks))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _attempt(self, session: _Session, request: prefill_pb2.PrefillRequest) -> None:
        """One attempt, to its end, which its router is told."""
        try:
            await self._prefill(session, request)
        except Exception as error:  # a bug must not leave the router waiting
            log.error("prefill_broken", ticket=request.ticket, error=repr(error), exc_info=error)
            session.put(failed_response(request, RpcError(grpc.StatusCode.INTERNAL, "internal error")))

    async def _prefill(self, session: _Session, request: prefill_pb2.PrefillRequest) -> None:
        asked = time.monotonic()
        try:
            await self._end_older(request)
            call = self._admit(request, asked)
        except PdserveError as error:
            session.put(failed_response(request, error))
            return
        committed = False
        link: asyncio.Task[None] | None = None
        deadline = self._deadline(call)
        try:
            with log_request(call.spec.request_id):
                if call.peer is not None:
                    link = asyncio.create_task(
                        self._link(call, request.decode_endpoint), name=f"link for {call.ticket}"
                    )
                await self._start(call, request.attempt, request.decode_tokens_held)
                session.put(accepted_response(call))
                first = await self._first(call)
                committed = first.prompt.end is not None
                session.put(first_response(call, first))
                self._on_first(call, first)
                if not committed and call.peer is not None:
                    done = await self._committed(call)
                    committed = True
                    session.put(committed_response(call, done))
        except PdserveError as error:
            spans.failure(call, error)
            log.info("prefill_failed", ticket=call.ticket, request_id=call.spec.request_id, reason=str(error))
            session.put(failed_response(request, error))
        except asyncio.CancelledError:
            fail_span(call.span, "cancelled")
            raise
        finally:
            if deadline is not None:
                deadline.cancel()
            self._release(
                call, committed
            )  # before anything is waited for: who is cancelled twice would never come to it
            if link is not None:
                link.cancel()
                await asyncio.gather(link, return_exceptions=True)

    def _deadline(self, call: Call) -> asyncio.TimerHandle | None:
        """The engine keeps the time of what it has; this is for what waits before it, and behind it for the commit."""
        if call.spec.time_remaining is None:
            return None
        left = call.spec.time_remaining - (time.monotonic() - call.asked)
        return asyncio.get_running_loop().call_later(left, call.events.put_nowait, DeadlineExceeded(_LATE))

    def on_step(self, step: StepDone) -> None:
        for chunk in step.chunks:
            if (call := self._calls.get(chunk.ticket)) is not None:
                spans.chunk(call, chunk)
        prompts = {prompt.ticket: prompt for prompt in step.prompts}
        for token in step.tokens:  # of each prompt the first alone is made here
            if (call := self._calls.get(token.ticket)) is not None:
                call.events.put_nowait(First(token, prompts[token.ticket]))
        for end in step.ends:
            if (call := self._calls.get(end.ticket)) is not None:
                call.events.put_nowait(end)
                self._forget(call)

    def on_message(self, message: TicketMessage) -> None:
        call = self._calls.get(message.ticket)
        if call is not None and isinstance(message, KvCommitted):
            call.events.put_nowait(message)

    def draining(self, seconds: float) -> None:
        """Prompts are short: what runs finishes, and what does not is computed elsewhere."""

    async def finished(self) -> None:
        """Wait until no ticket is left, and what was said of them is on its way, up to LAST_WORDS seconds."""
        await self._idle.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS):
                if tasks := [task for session in self._sessions for task in session.attempts.values()]:
                    await asyncio.wait(tasks)
                await asyncio.gather(*(session.flushed.wait() for session in self._sessions))

    def close(self) -> None:
        for session in self._sessions:
            session.fail(Unavailable("the worker stops"))

    async def _end_older(self, request: prefill_pb2.PrefillRequest) -> None:
        """A newer attempt at a ticket takes the place of the one that is here, once the engine has let go of it."""
        ticket, attempt = request.ticket, request.attempt
        remaining = request.sequence.time_remaining_ms / 1e3 or OLDER_PATIENCE
        try:
            async with asyncio.timeout(min(remaining, OLDER_PATIENCE)):
                while (older := self._calls.get(ticket)) is not None and older.attempt < attempt:
                    older.events.put_nowait(RpcError(grpc.StatusCode.ABORTED, f"attempt {attempt} takes its place"))
                    if older.started:
                        self._front.engine.send(CancelTicket(ticket))
                    await older.gone.wait()
        except TimeoutError:
            if remaining < OLDER_PATIENCE:
                raise DeadlineExceeded(_LATE) from None
            raise Unavailable(f"an older attempt than {attempt} at this ticket does not end") from None

    def _admit(self, request: prefill_pb2.PrefillRequest, asked: float) -> Call:
        front = self._front
        front.require_open()
        front.check_ticket(request.ticket)
        peer = request.decode_worker_id or None
        if peer is not None:
            check_endpoint(request.decode_endpoint, "decode_endpoint")
        spec = spec_from_proto(request.sequence)
        front.check(spec)
        if request.ticket in self._calls:
            raise RpcError(grpc.StatusCode.ABORTED, "this ticket is here already, or has not ended yet")
        span = start_span(names.SPAN_PREFILL, spec.traceparent, {names.TICKET: request.ticket})
        span.set_attributes({names.ATTEMPT: request.attempt, names.PREFILL_WORKER: front.worker_id})
        call = Call(request.ticket, request.attempt, spec, peer, asked, span, traceparent_of(span))
        self._calls[request.ticket] = call
        self._idle.clear()
        return call

    async def _link(self, call: Call, endpoint: str) -> None:
        """Have the link up by the time the first frames exist, and again where it ends before the engine had the ticket
        (idle links make room for others); computing does not wait for it."""
        assert call.peer is not None
        try:
            while True:
                await self._front.links.open(endpoint, call.peer)
                await self._front.links.ended(call.peer)
        except PdserveError as error:
            call.events.put_nowait(Unavailable(f"no link to {call.peer}: {error}"))

    async def _start(self, call: Call, attempt: int, peer_holds: int) -> None:
        spec = call.spec
        if self._front.prefix is not None:
            await self._front.prefix.prefetch(spec, call.traceparent)
        if spec.time_remaining is not None:
            spec = replace(spec, time_remaining=max(0.001, spec.time_remaining - (time.monotonic() - call.asked)))
        call.started, call.sent_ns = True, time.time_ns()
        self._front.start_prefill(StartPrefill(call.ticket, attempt, spec, call.peer, peer_holds))

    async def _first(self, call: Call) -> First:
        while True:
            event = await call.events.get()
            if isinstance(event, First):
                return event
            if isinstance(event, Ended):
                raise self._error(call, event)
            if isinstance(event, PdserveError):
                raise event

    async def _committed(self, call: Call) -> KvCommitted:
        while True:
            event = await call.events.get()
            if isinstance(event, KvCommitted):
                spans.transfer(call, event, self._front.links.path_of(call.peer or ""))
                return event
            if isinstance(event, Ended):
                raise self._error(call, event)
            if isinstance(event, PdserveError):
                raise event

    def _on_first(self, call: Call, first: First) -> None:
        prompt = first.prompt
        call.span.set_attribute(names.CACHED_TOKENS, prompt.cached_tokens)
        if self._front.prefix is not None:
            computed = len(call.spec.token_ids) - prompt.cached_tokens
            self._front.prefix.observe_prefill(computed, prompt.compute)
        call.span.set_attribute(names.TOKENS, len(call.spec.token_ids))
        call.span.end()

    def _release(self, call: Call, committed: bool) -> None:
        """It is over for its router, however: stop the work where it goes on, keep the prompt where it is done."""
        call.span.end()
        if not call.started:
            self._forget(call)
        elif committed:
            if self._front.prefix is not None:
                self._front.prefix.store_later(call.spec)
        elif not call.gone.is_set():
            self._front.engine.send(CancelTicket(call.ticket))

    def _forget(self, call: Call) -> None:
        """A ticket's id is free for a newer attempt."""
        del self._calls[call.ticket]
        call.gone.set()
        if not self._calls:
            self._idle.set()

    def _error(self, call: Call, end: Ended) -> PdserveError:
        detail = end.detail or end.reason
        match end.reason:
            case EndReason.NO_CAPACITY:
                return NoCapacity(detail)
            case EndReason.DEADLINE:
                return DeadlineExceeded(detail)
            case EndReason.INVALID:
                return InvalidRequest("sequence", detail)
            case EndReason.CANCELLED:
                return RpcError(grpc.StatusCode.CANCELLED, detail)
            case EndReason.TRANSFER_FAILED if call.peer is not None and self._front.links.is_up(call.peer):
                return RpcError(grpc.StatusCode.ABORTED, detail)  # the link lives, so the other side closed the ticket
            case EndReason.TRANSFER_FAILED | EndReason.DRAINING:
                return Unavailable(detail)
            case EndReason.PREEMPTED:
                return RpcError(grpc.StatusCode.ABORTED, f"preempted: {detail}")
            case _:
                return RpcError(grpc.StatusCode.INTERNAL, f"the engine ended the ticket: {detail}")


def make_service(front: WorkerFront) -> tuple[PrefillServicer, Service]:
    """The service for `run_worker`."""
    servicer = PrefillServicer(front)
    add = prefill_pb2_grpc.add_PrefillServiceServicer_to_server
    return servicer, (add, servicer, "pdserve.v1.PrefillService")
