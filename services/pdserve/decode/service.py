"""DecodeService: sessions of routers, and who of them owns which ticket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc.aio
import structlog

from pdserve.core.errors import InvalidRequest, Unavailable
from pdserve.core.sequence import EndReason, SequenceSpec
from pdserve.decode import spans
from pdserve.decode.hand_offs import HandOffs
from pdserve.decode.ticket import Ticket
from pdserve.rpc.convert import end_reason_to_proto, spec_from_proto
from pdserve.rpc.server import Service
from pdserve.v1 import decode_pb2, decode_pb2_grpc
from pdserve.worker.front import WorkerFront
from pdserve.worker.messages import (
    AlreadyReady,
    AttemptFailed,
    CancelTicket,
    Detached,
    HandOffFailed,
    KvCommitted,
    Rearm,
    Rearmed,
    Reserve,
    ReservedPages,
    StepDone,
    TicketMessage,
    TicketReady,
)
from pdserve.worker.router_session import RouterSession, attend

log = structlog.get_logger(__name__)

LAST_WORDS = 5.0  # seconds, for a router that lags behind; one of an older release never says that it has heard


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """pdserve.v1.DecodeService over a WorkerFront.

    A ticket stays in `_tickets` until the engine's Ended, also when its session is gone: until then its id is taken.
    """

    def __init__(self, front: WorkerFront) -> None:
        self._front = front
        self._hand_offs = HandOffs(front)
        self._tickets: dict[str, Ticket] = {}
        self._sessions: set[RouterSession] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._step, self._step_seconds = 0, 0.0

    async def Session(  # type: ignore[override]  # a coroutine that reads and writes by itself
        self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        session = RouterSession()

        def reading() -> Coroutine[Any, Any, None]:
            self._sessions.add(session)
            return self._read(session, context)

        kinds = decode_pb2.SessionRequest, decode_pb2.SessionResponse
        try:
            await attend(session, context, kinds, self._front, reading)
        finally:
            self._end_session(session)

    def on_step(self, step: StepDone) -> None:
        """The hot path: one message a step for each session that has part in it."""
        self._step, self._step_seconds = step.number, step.seconds
        tickets = self._tickets
        for chunk in step.chunks:
            if (ticket := tickets.get(chunk.ticket)) is not None:
                spans.chunk(ticket, chunk)
        for prompt in step.prompts:  # computed here: complete without a transfer
            ticket = tickets.get(prompt.ticket)
            if ticket is None:
                continue
            self._on_ready(ticket, ticket.attempt, 0)
            if self._front.prefix is not None:
                self._front.prefix.observe_prefill(len(ticket.spec.token_ids) - prompt.cached_tokens, prompt.compute)
        parts: dict[RouterSession, decode_pb2.SessionResponse] = {}
        session: RouterSession | None = None
        add: Any = None
        for out in step.tokens:
            ticket = tickets.get(out.ticket)
            if ticket is None:
                continue
            ticket.tokens += 1
            if ticket.tokens == 1:
                ticket.stepping_ns = time.time_ns() - round(1e9 * step.seconds)
            if ticket.session is not session:
                session = ticket.session
                add = self._part(parts, session).tokens.add
            token = add(ticket=out.ticket, position=out.position).token
            token.id = out.token
            if out.logprobs is not None:
                token.logprob = out.logprobs.logprob
                for other, value in out.logprobs.top:
                    token.top_logprobs.add(token_id=other, logprob=value)
        for end in step.ends:
            ticket = tickets.pop(end.ticket, None)
            if ticket is None:
                continue
            reason, detail = ticket.verdict or (end.reason, end.detail)
            self._part(parts, ticket.session).ends.add(
                ticket=end.ticket, reason=end_reason_to_proto(reason), detail=detail
            )
            self._ended(ticket, reason)
        for session, response in parts.items():
            session.put(response)

    def on_message(self, message: TicketMessage) -> None:
        ticket = self._tickets.get(message.ticket)
        if ticket is None:
            return
        match message:
            case ReservedPages(_, attempt, held):
                self._on_reserved(ticket, attempt, held)
            case TicketReady(_, attempt, kv_bytes):
                self._on_ready(ticket, attempt, kv_bytes)
            case AttemptFailed(_, attempt, reason):
                failed = decode_pb2.AttemptFailed(ticket=ticket.id, attempt=attempt, reason=reason)
                self._log("attempt_failed", ticket, attempt=attempt, peer=ticket.peer, reason=reason)
                ticket.session.put(decode_pb2.SessionResponse(attempt_failed=failed))
            case Rearmed(_, attempt, held):
                rearmed = decode_pb2.Rearmed(ticket=ticket.id, attempt=attempt, tokens_held=held)
                self._log("rearmed", ticket, attempt=attempt, peer=ticket.peer, tokens_held=held)
                ticket.session.put(decode_pb2.SessionResponse(rearmed=rearmed))
            case AlreadyReady(_, attempt, first_token):
                already = decode_pb2.AlreadyReady(ticket=ticket.id, attempt=attempt, first_token=first_token)
                ticket.session.put(decode_pb2.SessionResponse(already_ready=already))
            case Detached() | HandOffFailed():
                self._hand_offs.on_message(ticket, message)
            case KvCommitted():
                pass  # only a prefill engine says so

    def draining(self, seconds: float) -> None:
        """Let routers know for how long what runs may stay, so that they hand off what would not be through by then."""
        told = decode_pb2.SessionResponse(draining=decode_pb2.Draining(remaining_ms=round(1e3 * seconds)))
        for session in self._sessions:
            session.put(told)

    async def finished(self) -> None:
        """Wait until no ticket is left, and every router has heard so, up to LAST_WORDS seconds."""
        await self._idle.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS):
                await asyncio.gather(*(session.settled.wait() for session in self._sessions))

    def close(self) -> None:
        for session in self._sessions:
            session.fail(Unavailable("the worker stops"))

    async def _read(self, session: RouterSession, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while isinstance(request := await context.read(), decode_pb2.SessionRequest):
            match request.WhichOneof("command"):
                case "submit":
                    self._submit(session, request.submit)
                case "cancel":
                    self._cancel(self._tickets.get(request.cancel.ticket), session)
                case "rearm":
                    self._rearm(session, request.rearm)
                case "hand_off":
                    if (ticket := self._mine(session, request.hand_off.ticket)) is not None:
                        self._hand_offs.begin(ticket, request.hand_off)
                case "call_off":
                    if (ticket := self._mine(session, request.call_off.ticket)) is not None:
                        self._hand_offs.call_off(ticket, request.call_off.new_ticket)
                case "settled":
                    session.settled.set()
                case "hello":
                    raise InvalidRequest("hello", "a second hello in one session")
                case _:
                    raise InvalidRequest("command", "unknown to this version")

    def _submit(self, session: RouterSession, submit: decode_pb2.Submit) -> None:
        try:
            self._front.check_ticket(submit.ticket)
            if submit.ticket in self._tickets:
                raise InvalidRequest("ticket", "is here already, or has not ended yet")
            spec = spec_from_proto(submit.sequence)
            self._front.check(spec)
            self._front.require_open()
        except Unavailable as error:
            self._refuse(session, submit.ticket, EndReason.DRAINING, str(error))
            return
        except InvalidRequest as error:
            self._refuse(session, submit.ticket, EndReason.INVALID, str(error))
            return
        ticket = Ticket(submit.ticket, submit.attempt, spec, submit.prefill_worker_id or None, session, time.time_ns())
        self._tickets[ticket.id] = ticket
        self._idle.clear()
        if ticket.peer is None and self._front.prefix is not None:
            ticket.preparing = asyncio.create_task(self._prepare(ticket), name=f"prepare {ticket.id}")
        else:
            self._reserve(ticket, spec)

    async def _prepare(self, ticket: Ticket) -> None:
        """Fetch what the prefix cache has of a prompt that is computed here."""
        assert self._front.prefix is not None
        spec, began = ticket.spec, time.monotonic()
        await self._front.prefix.prefetch(spec)
        if spec.time_remaining is not None:
            spec = replace(spec, time_remaining=max(0.001, spec.time_remaining - (time.monotonic() - began)))
        ticket.preparing = None
        self._reserve(ticket, spec)

    def _reserve(self, ticket: Ticket, spec: SequenceSpec) -> None:
        self._front.engine.send(Reserve(ticket.id, ticket.attempt, spec, ticket.peer))

    def _rearm(self, session: RouterSession, rearm: decode_pb2.Rearm) -> None:
        """Hand a new attempt to the engine, which is the arbiter. What contradicts the ticket ends it, as INTERNAL:
        no client can have caused it, and its request is to be continued elsewhere."""
        ticket = self._tickets.get(rearm.ticket)
        if ticket is None or ticket.session is not session:
            # Its end may have crossed this on the way; a router that got that one takes no notice of a second.
            self._refuse(session, rearm.ticket, EndReason.TRANSFER_FAILED, "no such ticket here")
            return
        try:
            if ticket.peer is None:
                raise InvalidRequest("ticket", "its prompt is computed here")
            if not rearm.prefill_worker_id:
                raise InvalidRequest("prefill_worker_id", "must be set")
            spec = spec_from_proto(rearm.sequence)
            self._front.check(spec)
        except InvalidRequest as error:
            log.error("rearm_refused", ticket=ticket.id, reason=str(error))
            ticket.verdict = ticket.verdict or (EndReason.INTERNAL, f"rearmed, but {error}")
            self._cancel(ticket, session)
            return
        ticket.attempt, ticket.spec, ticket.peer = rearm.attempt, spec, rearm.prefill_worker_id
        self._front.engine.send(Rearm(ticket.id, rearm.attempt, spec, rearm.prefill_worker_id))

    def _mine(self, session: RouterSession, ticket_id: str) -> Ticket | None:
        """A ticket of that session; None: it is over, and its end may be on the way."""
        ticket = self._tickets.get(ticket_id)
        return ticket if ticket is not None and ticket.session is session else None

    def _cancel(self, ticket: Ticket | None, session: RouterSession) -> None:
        if ticket is None or ticket.session is not session:
            return
        if ticket.preparing is None:
            self._front.engine.send(CancelTicket(ticket.id))
            return
        ticket.preparing.cancel()
        del self._tickets[ticket.id]
        reason, detail = ticket.verdict or (EndReason.CANCELLED, "")
        self._refuse(session, ticket.id, reason, detail)
        self._ended(ticket, reason)

    def _refuse(self, session: RouterSession, ticket_id: str, reason: EndReason, detail: str) -> None:
        """An end that the engine has no part in. It stands in a step of its own, under the newest step's number."""
        end = decode_pb2.End(ticket=ticket_id, reason=end_reason_to_proto(reason), detail=detail)
        session.put(decode_pb2.SessionResponse(step=decode_pb2.Step(number=self._step, ends=[end])))

    def _end_session(self, session: RouterSession) -> None:
        session.close()
        self._sessions.discard(session)
        mine = [ticket for ticket in self._tickets.values() if ticket.session is session]
        for ticket in mine:
            self._cancel(ticket, session)
        if mine:
            log.info("session_ended", router_id=session.router_id, cancelled=len(mine))

    def _part(self, parts: dict[RouterSession, decode_pb2.SessionResponse], session: RouterSession) -> decode_pb2.Step:
        response = parts.get(session)
        if response is None:
            response = parts[session] = decode_pb2.SessionResponse()
            response.step.number, response.step.seconds = self._step, self._step_seconds
        return response.step

    def _on_reserved(self, ticket: Ticket, attempt: int, held: int) -> None:
        ticket.reserved_ns = time.time_ns()
        spans.reserved(ticket, held)
        reserved = decode_pb2.Reserved(ticket=ticket.id, attempt=attempt, tokens_held=held)
        ticket.session.put(decode_pb2.SessionResponse(reserved=reserved))

    def _on_ready(self, ticket: Ticket, attempt: int, kv_bytes: int) -> None:
        ticket.ready_ns, ticket.kv_bytes = time.time_ns(), kv_bytes
        spans.ready(ticket)
        ready = decode_pb2.Ready(ticket=ticket.id, attempt=attempt, kv_bytes=kv_bytes)
        ticket.session.put(decode_pb2.SessionResponse(ready=ready))

    def _ended(self, ticket: Ticket, reason: EndReason) -> None:
        """The books after a ticket has left `_tickets`."""
        self._hand_offs.ended(ticket)
        if not self._tickets:
            self._idle.set()
        spans.ended(ticket, reason, time.time_ns())
        # What came from a prefill worker is that one's to store.
        if ticket.peer is None and ticket.ready_ns and self._front.prefix is not None:
            self._front.prefix.store_later(ticket.spec)

    def _log(self, event: str, ticket: Ticket, **details: Any) -> None:
        log.info(event, ticket=ticket.id, request_id=ticket.spec.request_id, **details)


def make_service(front: WorkerFront) -> tuple[DecodeServicer, Service]:
    """The service for `run_worker`."""
    servicer = DecodeServicer(front)
    add = decode_pb2_grpc.add_DecodeServiceServicer_to_server
    return servicer, (add, servicer, "pdserve.v1.DecodeService")
