"""Following one try: events in order of arrival, tokens in order of position, another prefill worker in time, and
another decode worker where that one is going to stop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog

from pdserve.core.errors import InvalidRequest, NoCapacity
from pdserve.core.sequence import EndReason
from pdserve.policy.draining import HandOff
from pdserve.router.events import (
    AlreadyReady,
    AttemptFailed,
    Ended,
    Event,
    FirstToken,
    Lost,
    NewToken,
    Placed,
    PrefillFailed,
    Ready,
    Rearmed,
    Reserved,
)
from pdserve.router.leaving import Leaving
from pdserve.router.ticket import Ticket
from pdserve.router.worker import Worker
from pdserve.rpc.errors import DeadlineExceeded
from pdserve.v1 import inference_pb2

if TYPE_CHECKING:
    from pdserve.router.request import RequestRun

log = structlog.get_logger(__name__)

# Seconds that a reservation is kept while it lacks a prefill worker. Others may wait for its pages.
REARM_PATIENCE = 2.0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a try, or its prefill half, ended without completing the answer.

    `refused`: nothing was spent, so it does not count as a try. `counted`: it did already. `lost`: the connection to
    `worker` ended under it.
    """

    reason: str
    refused: bool = False
    worker: Worker | None = None
    counted: bool = False
    lost: bool = False


class Follower:
    """Reads one try's events and gives the answer its tokens."""

    def __init__(self, run: RequestRun, ticket: Ticket) -> None:
        self._run = run
        self._ticket = ticket
        self._next = ticket.given
        self._early: dict[int, tuple[int, inference_pb2.Token, float]] = {}
        self._ended: EndReason | None = None
        self._ready = False
        self._down: Failure | None = None  # why there is no prefill worker, until another one took over
        self._asked = False  # a Rearm is on its way
        self._patient_until: float | None = None
        self._leaving = Leaving(run)

    async def follow(self) -> Failure | None:
        """Follow to the end of the answer (None) or of the try. Raises what no other try would do better."""
        run = self._run
        while True:
            failure = None
            for stamp, ticket, event in await self._ticket.next_events():
                if ticket is self._ticket:
                    failure = self._take(stamp, event)
                elif self._leaving.leads_to(ticket):
                    failure = self._take_new(stamp, ticket, event)
                if failure is not None or run.answer.ending is not None:
                    break
            await run.send_output()
            run.timeline.tell()
            if run.answer.ending is not None:
                return None
            if failure is not None:
                return failure

    async def end(self) -> None:
        """Let go of what moves have added to the try."""
        await self._leaving.end()

    def _take(self, stamp: int, event: Event) -> Failure | None:
        ticket, failure = self._ticket, None
        if self._leaving.take(event):
            return self._in_vain()
        match event:
            case NewToken(position, token, took):
                self._keep(position, stamp, token, took)
            case FirstToken(attempt, position, token):
                if attempt == ticket.attempt:  # an older one's would not be what the newer one was given
                    self._keep(position, stamp, token, event.took)
                    self._first_token(event)
            case Reserved(tokens_held):
                self._reserved(stamp, tokens_held)
            case Ready(kv_bytes):
                self._on_ready(stamp, kv_bytes)
            case PrefillFailed(attempt, error, lost):
                failure = self._prefill_failed(error, lost) if attempt == ticket.attempt else None
            case AttemptFailed(attempt, reason):
                if attempt == ticket.attempt:
                    ticket.given_up(reason)
            case Placed(reason):
                failure = self._placed(reason)
            case Rearmed(attempt, tokens_held):
                if attempt == ticket.attempt:
                    self._down, self._asked = None, False
                    ticket.rearmed(tokens_held)
            case AlreadyReady(attempt, token_id):
                failure = self._already_ready(stamp, attempt, token_id)
            case Ended(reason, detail) if not reason.answer_complete:
                failure = _ended(reason, detail, ticket.assignment.decode, self._has_first)
            case Ended(reason):
                self._ended = reason
            case Lost(reason):
                failure = Failure(reason, worker=ticket.assignment.decode)
        self._in_order()
        if failure is None and self._ended is not None and self._down is not None and not self._has_first:
            return replace(self._down, counted=True)  # the one token that nobody can tell any more
        if failure is None:
            self._consider_leaving()
        elif self._leaving.drains:
            self._run.measure.handed_off(HandOff.REPLAYED)
        return failure

    # Leaving a decode worker that is going to stop.

    def _consider_leaving(self) -> None:
        """Once it decodes, and nothing of it is on the way."""
        over = self._ended is not None or self._run.answer.ending is not None
        if self._leaving.drains and self._ready and self._has_first and self._down is None and not over:
            self._leaving.consider(self._ticket)

    def _take_new(self, stamp: int, ticket: Ticket, event: Event) -> Failure | None:
        """Take in what happened to the ticket that is to take over; where its KV is complete, follow it from now on."""
        if self._leaving.take_new(event):
            self._ticket = ticket
            if isinstance(event, Ready):
                self._on_ready(stamp, event.kv_bytes)
        return self._in_vain()

    def _in_vain(self) -> Failure | None:
        """Why the try is over, where a move failed that had gone too far; where it had not, another may begin."""
        if not self._leaving.vain:
            self._consider_leaving()
            return None
        self._run.measure.handed_off(HandOff.REPLAYED)
        return Failure(self._leaving.vain, worker=self._ticket.assignment.decode)

    @property
    def _has_first(self) -> bool:
        """The attempt's first token is there."""
        return self._next > self._ticket.given

    # The prefill half.

    def _prefill_failed(self, error: Exception, lost: bool) -> Failure | None:
        """Keep the reservation and look for another prefill worker, unless this one owes nothing any more."""
        run, ticket = self._run, self._ticket
        if (self._ready and self._has_first) or self._down is not None:
            return None
        failure = replace(_prefill_failed(error, ticket.assignment.prefill), lost=lost)
        decode = ticket.assignment.decode
        if decode is None or self._ended is not None:
            return failure
        run.count(failure)
        self._down = failure
        if self._ready:
            self._rearm()
            return None
        now = asyncio.get_running_loop().time()
        if self._patient_until is None or not failure.refused:
            self._patient_until = now + REARM_PATIENCE
        until = self._patient_until
        ticket.place(lambda: run.place_prefill(failure, decode, until))
        return None

    def _placed(self, problem: str) -> Failure | None:
        if self._down is None or self._asked:
            return None  # not needed any more
        if problem:
            return replace(self._down, reason=f"{self._down.reason}; then {problem}", counted=True)
        self._rearm()
        return None

    def _rearm(self) -> None:
        run, ticket = self._run, self._ticket
        assert self._down is not None
        self._asked = True
        ticket.rearm(run.spec())
        run.measure.rearmed()
        log.info(
            "rearmed",
            ticket=ticket.id,
            attempt=ticket.attempt,
            reason=self._down.reason,
            prefill_worker=ticket.prefill_worker_id,
            shown_tokens=run.answer.num_tokens,
        )

    def _on_ready(self, stamp: int, kv_bytes: int) -> None:
        run, ticket = self._run, self._ticket
        self._ready = True
        run.usage.kv_transfer_bytes += kv_bytes
        if ticket.assignment.prefill is not None and not run.timeline.second:
            run.timeline.ready = stamp
        if self._down is not None and not self._asked:  # complete after all: only its first token may be missing
            ticket.stop_placing()
            if self._has_first:
                self._down = None
            else:
                self._rearm()

    def _already_ready(self, stamp: int, attempt: int, token_id: int) -> Failure | None:
        ticket, down = self._ticket, self._down
        if not ticket.back_to(attempt):
            return Failure(f"attempt {attempt} is said to be complete, and never was made")
        self._down, self._asked, self._ready = None, False, True
        if self._has_first or down is None:
            return None
        if self._run.spec().params.logprobs is not None:
            return replace(down, reason=f"{down.reason}; the first token's logprobs are lost", counted=True)
        self._keep(ticket.given, stamp, inference_pb2.Token(id=token_id))
        return None

    # Tokens.

    def _keep(self, position: int, stamp: int, token: inference_pb2.Token, took: float = 0.0) -> None:
        if position >= self._next:  # a token that was handed over already does not count twice
            self._early[position] = stamp, token, took

    def _in_order(self) -> None:
        """Hand over the tokens that follow on what is there: the second may overtake the first."""
        run = self._run
        while run.answer.ending is None and self._next in self._early:
            stamp, token, took = self._early.pop(self._next)
            self._name_workers()
            self._next += 1
            run.answer.add(token)
            run.timeline.token(stamp, run.new_tokens, took)
            self._leaving.token(self._next - 1)
        if run.answer.ending is None and self._ended is not None and not self._early and self._has_first:
            run.answer.ended_by_worker(self._ended)

    def _name_workers(self) -> None:
        usage, ticket = self._run.usage, self._ticket
        decode, prefill_id = ticket.assignment.decode, ticket.prefill_worker_id
        if not usage.prefill_worker:
            usage.prefill_worker = prefill_id or (decode.worker_id if decode else "")
        if decode is not None and (not prefill_id or self._has_first):
            usage.decode_worker = decode.worker_id

    def _first_token(self, event: FirstToken) -> None:
        usage = self._run.usage
        if not self._run.new_tokens:
            usage.cached_tokens, usage.blocks_reused = event.cached_tokens, event.blocks_reused
        if event.end is not None and event.end.answer_complete:
            self._ended = event.end

    def _reserved(self, stamp: int, tokens_held: int) -> None:
        run, assignment = self._run, self._ticket.assignment
        if run.new_tokens:
            return
        run.timeline.reserved = stamp
        if assignment.prefill is None and assignment.decode is not None and assignment.decode.layout is not None:
            run.usage.cached_tokens = tokens_held
            run.usage.blocks_reused = tokens_held // assignment.decode.layout.block_size


def _ended(reason: EndReason, detail: str, worker: Worker | None, progress: bool) -> Failure:
    """What a decode worker's end means for the request. Raises what no other worker would do better."""
    if reason is EndReason.INVALID:
        raise InvalidRequest("request", detail or "the worker cannot take it")
    if reason is EndReason.DEADLINE:
        raise DeadlineExceeded("the deadline passed")
    refused = reason is EndReason.NO_CAPACITY or (reason is EndReason.DRAINING and not progress)
    return Failure(f"{reason}: {detail}" if detail else str(reason), refused, worker)


def _prefill_failed(error: Exception, worker: Worker | None) -> Failure:
    """The same for a prefill that failed."""
    if isinstance(error, InvalidRequest | DeadlineExceeded):
        raise error
    return Failure(str(error), isinstance(error, NoCapacity), worker)
