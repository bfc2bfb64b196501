"""Where the engine and the links meet: whose pages a link may touch, and when a ticket is over.

Everything here runs in the engine loop. The rule that keeps pages safe: while a link may read or write a ticket's
pages, the ticket keeps them; it is finished only by the link's own word (committed, stopped, failed, revoked).

A reservation outlives its attempts. A new one is armed in two steps: the old one is revoked, and only its ack, behind
whatever its link had to say before, tells whether it completed in time, or how much of it landed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listed
from typing import Protocol

import torch
from msgspec import structs

from pdserve.core.errors import NoCapacity
from pdserve.core.sequence import EndReason, Sequence, SequenceSpec
from pdserve.core.ticket import Ticket, TicketEvent, TicketState
from pdserve.engine.engine import Engine, Outputs
from pdserve.engine.scheduler import Phase
from pdserve.transfer.messages import (
    PULL_SUFFIX,
    Granted,
    KvReady,
    PullWanted,
    ReceiveFailed,
    Revoked,
    SendCommitted,
    SendFailed,
    SendStopped,
    TransferEvent,
    TransferReport,
)
from pdserve.worker.messages import (
    AlreadyReady,
    AttemptFailed,
    CallOff,
    HandOff,
    KvCommitted,
    Rearm,
    Rearmed,
    Reserve,
    ReservedPages,
    StartPrefill,
    TicketMessage,
    TicketReady,
)
from pdserve.worker.moves import MoveLinks, Moves
from pdserve.worker.pulls import PullLinks, Pulls

Tickets = Listed[tuple[str, int]]


class Links(PullLinks, MoveLinks, Protocol):
    """What the hand-off needs of the hub of links; see transfer.hub.LinkHub."""


class Handoff:
    """Tickets of one engine, on both sides of the wire."""

    def __init__(self, engine: Engine, links: Links, send: Callable[[TicketMessage], None], vocab_size: int) -> None:
        self._engine, self._links, self._send, self._vocab_size = engine, links, send, vocab_size
        # The decode side's tickets, until their pages are free.
        self._tickets: dict[str, Ticket] = {}
        self._rearming: dict[str, Rearm] = {}  # waits for the older attempt's Revoked
        # Tickets that wait for a link to let go, with what is to be said then.
        self._closing: dict[str, tuple[EndReason, str]] = {}
        self._pulls = Pulls(engine, links, self._slots, self._held)
        self._moves = Moves(engine, links, self._slots, send)
        self._rearms = 0

    def start_prefill(self, message: StartPrefill) -> None:
        """Admit a prompt, and let what is cached of it leave at once."""
        ticket, spec = message.ticket, message.spec
        left = spec.prompt_len + spec.params.max_tokens - len(spec.token_ids)
        if message.peer is None and left > 1:
            self._engine.refuse(ticket, EndReason.INVALID, "without a decode worker, only one token can be computed")
            return
        sequence = self._admit(ticket, spec, lambda: self._engine.add(ticket, spec, hands_off=message.peer is not None))
        if sequence is None or message.peer is None:
            return
        decision = self._pulls.consider(sequence, message.peer, message.peer_holds)
        slots = self._slots(sequence)
        self._links.start_send(ticket, message.attempt, message.peer, slots, sequence.num_given, decision.pull)
        if decision.pull:
            self._pulls.begin(sequence, message.attempt, message.peer, decision, self._engine.clock())
        if sequence.num_cached:
            for layer in range(self._engine.scheduler.layout.num_layers):
                self._links.advance([(ticket, sequence.num_cached)], layer)

    def reserve(self, message: Reserve) -> None:
        """Reserve pages and grant them to the peer, or compute here where there is none."""
        ticket, spec, peer = message.ticket, message.spec, message.peer
        take_in = self._engine.add if peer is None else self._engine.reserve
        sequence = self._admit(ticket, spec, lambda: take_in(ticket, spec))
        if sequence is None:
            return
        record = Ticket(ticket, message.attempt, sequence.num_given, sequence.num_cached)
        self._tickets[ticket] = record
        self._send(ReservedPages(ticket, message.attempt, sequence.num_cached))
        if peer is not None:
            record.on(TicketEvent.GRANT)
            self._grant(record, sequence, peer)

    def rearm(self, message: Rearm) -> None:
        """Fence a ticket's attempt and begin a newer one into the same pages, or say that none is needed.

        A ticket that is unknown or over gets no answer: its end was told, or is about to be. A Rearm that contradicts
        its ticket is its router's mistake and no client's, so it ends the ticket as INTERNAL, not as INVALID.
        """
        ticket = message.ticket
        found, record = self._engine.scheduler.get(ticket), self._tickets.get(ticket)
        if found is None or record is None or record.over:
            return
        if not record.waits_for_kv and record.first_token is not None:
            self._send(AlreadyReady(ticket, record.attempt, record.first_token))
            return
        if problem := self._contradiction(message, record, *found):
            self.close(ticket, EndReason.INTERNAL, f"rearmed, but {problem}")
            return
        waits = ticket in self._rearming
        self._rearming[ticket] = message
        if waits:
            return  # the ack on its way will do
        if record.state is TicketState.RECEIVING:
            self._links.revoke(ticket, f"attempt {message.attempt} takes its place")
        else:
            self._begin_anew(record)

    def hand_off(self, message: HandOff) -> None:
        """Begin to move a running sequence to another decode worker."""
        self._moves.begin(message, self._tickets.get(message.ticket))

    def call_off(self, message: CallOff) -> None:
        """Let a sequence that is handed off go on here."""
        self._moves.call_off(message.ticket, message.new_ticket, message.reason)

    def close(self, ticket: str, reason: EndReason, detail: str = "") -> None:
        """End a ticket from outside (cancelled, deadline). One that is unknown, or closing already, is left alone."""
        found = self._engine.scheduler.get(ticket)
        if found is None or ticket in self._closing:
            return
        _, phase = found
        self._moves.drop(ticket)
        self._rearming.pop(ticket, None)
        if record := self._tickets.get(ticket):
            record.finish(reason)
        if self._pulls.active(ticket):
            self._wait_for_link(ticket, reason, detail)
            self._pulls.stop(ticket, reason)
        elif phase is Phase.AWAITING_KV:
            self._wait_for_link(ticket, reason, detail)
            self._links.revoke(ticket, reason)
        elif self._engine.hands_off(ticket):
            self._wait_for_link(ticket, reason, detail)
            self._links.stop_send(ticket)
        else:
            self._engine.finish(ticket, reason, detail)

    def report(self, links: TransferReport) -> TransferReport:
        """What the links count, with what is counted here."""
        pulls, moves = self._pulls, self._moves
        return structs.replace(
            links,
            rearms=self._rearms,
            pulled_tokens=pulls.tokens,
            pulls_given_up=pulls.given_up,
            handed_off=moves.completed,
            handed_off_bytes=moves.kv_bytes,
        )

    @property
    def deadline(self) -> float | None:
        """When `give_up_late` is to be called, on the monotonic clock; None: not at all."""
        return self._pulls.deadline

    def give_up_late(self, now: float) -> None:
        """Compute what should have been pulled, where that took too long."""
        self._pulls.give_up_late(now)

    def closing(self, ticket: str) -> bool:
        """Whether a ticket is over, and only waits for its link to let go."""
        return ticket in self._closing

    def after_step(self, outputs: Outputs) -> None:
        """Commit the prompts that a step completed; where the answer ended with its first token, call the link off.
        Tickets whose prompt was computed here go on, and those that ended are free."""
        for done in outputs.prompts:
            if record := self._tickets.get(done.ticket):
                record.on(TicketEvent.COMPLETE)
                record.on(TicketEvent.START)
            found = self._engine.scheduler.get(done.ticket)
            if found is None or not self._engine.hands_off(done.ticket):
                continue
            if done.end is None:
                self._links.finish_send(done.ticket, found[0].tokens[-1])
            else:
                self._closing[done.ticket] = (done.end, "")
                self._links.stop_send(done.ticket)
        for end in outputs.ends:
            self._moves.drop(end.ticket)
            if end.ticket not in self._engine.scheduler and (record := self._tickets.pop(end.ticket, None)):
                if not record.over:
                    record.finish(end.reason)
                record.on(TicketEvent.FREE)

    def on_event(self, event: TransferEvent) -> None:
        """Take in what a link said about a ticket."""
        if isinstance(event, Granted | PullWanted) or event.ticket.endswith(PULL_SUFFIX):
            ticket = self._pulls.on_event(event)
            if ticket is not None and ticket in self._closing:
                self._links.stop_send(ticket)
            return
        if self._moves.owns(event.ticket):
            self._moves.on_event(event)
            return
        match event:
            case Revoked(ticket) | SendStopped(ticket) if ticket in self._closing:
                self._engine.finish(ticket, *self._closing.pop(ticket))
            case Revoked(ticket, landed) if ticket in self._rearming:
                record = self._tickets[ticket]
                record.attempt_failed(record.attempt, landed)  # unless its link said so before the ack
                self._begin_anew(record)
            case Revoked() | SendStopped():
                pass  # it became ready before it could be fenced
            case _ if event.ticket in self._closing or event.ticket not in self._engine.scheduler:
                pass  # its ack is on the way
            case KvReady(ticket, attempt, first_token, kv_bytes):
                self._ready(self._tickets[ticket], attempt, first_token, kv_bytes)
            case ReceiveFailed(ticket, attempt, reason, landed):
                if self._tickets[ticket].attempt_failed(attempt, landed) and ticket not in self._rearming:
                    self._send(AttemptFailed(ticket, attempt, reason))
            case SendCommitted(ticket, kv_bytes, seconds, exposed, at):
                self._send(KvCommitted(ticket, kv_bytes, seconds, exposed, at))
                self._engine.finish(ticket, EndReason.LENGTH, "handed off")
            case SendFailed(ticket, reason) if self._pulls.active(ticket):
                self._wait_for_link(ticket, EndReason.TRANSFER_FAILED, reason)
                self._pulls.stop(ticket, reason)
            case SendFailed(ticket, reason):
                self._engine.finish(ticket, EndReason.TRANSFER_FAILED, reason)

    def _ready(self, record: Ticket, attempt: int, first_token: int, kv_bytes: int) -> None:
        if first_token >= self._vocab_size:  # an embedding has no row for it
            self.close(record.id, EndReason.TRANSFER_FAILED, f"the peer's first token {first_token} is none")
            return
        if not record.complete(attempt, first_token):
            return
        self._send(TicketReady(record.id, attempt, kv_bytes))
        record.on(TicketEvent.START)
        self._engine.activate(record.id, first_token)
        if self._rearming.pop(record.id, None):
            self._send(AlreadyReady(record.id, attempt, first_token))

    def _begin_anew(self, record: Ticket) -> None:
        """Arm the attempt that waited; no link touches the ticket's pages now."""
        message = self._rearming.pop(record.id)
        try:
            sequence = self._engine.extend(record.id, message.spec)
        except NoCapacity as error:
            self._engine.finish(record.id, EndReason.NO_CAPACITY, str(error))
            return
        self._rearms += 1
        record.rearm(message.attempt, sequence.num_given)
        self._send(Rearmed(record.id, record.attempt, record.held))
        self._grant(record, sequence, message.peer)

    def _grant(self, record: Ticket, sequence: Sequence, peer: str) -> None:
        self._links.grant(record.id, record.attempt, peer, self._slots(sequence), record.end, record.held)

    def _contradiction(self, message: Rearm, record: Ticket, sequence: Sequence, phase: Phase) -> str:
        """What is wrong with a Rearm, if anything."""
        newest = self._rearming.get(message.ticket, record).attempt
        ours, theirs = sequence.spec, message.spec
        if phase is not Phase.AWAITING_KV:
            return "its prompt is computed here"
        if message.attempt <= newest:
            return f"attempt {message.attempt} is not newer than {newest}"
        if theirs.token_ids[: len(ours.token_ids)] != ours.token_ids:
            return "its input does not go on from the one before"
        if (theirs.prompt_len, theirs.params, theirs.cache_salt) != (ours.prompt_len, ours.params, ours.cache_salt):
            return "it is another request"
        if len(theirs.token_ids) >= (limit := self._engine.scheduler.config.max_model_len):
            return f"{len(theirs.token_ids)} tokens leave no room in {limit}"
        return ""

    def _admit(self, ticket: str, spec: SequenceSpec, take_in: Callable[[], Sequence]) -> Sequence | None:
        scheduler = self._engine.scheduler
        if ticket in scheduler:
            self._engine.refuse(ticket, EndReason.INVALID, "this ticket is here already")
            return None
        if not spec.token_ids or len(spec.token_ids) >= scheduler.config.max_model_len:
            detail = f"{len(spec.token_ids)} tokens, max_model_len is {scheduler.config.max_model_len}"
            self._engine.refuse(ticket, EndReason.INVALID, detail)
            return None
        try:
            return take_in()
        except NoCapacity as error:
            self._engine.refuse(ticket, EndReason.NO_CAPACITY, str(error))
            return None

    def _wait_for_link(self, ticket: str, reason: EndReason, detail: str) -> None:
        self._engine.stop(ticket)
        self._closing[ticket] = (reason, detail)

    def _held(self, ticket: str) -> int:
        record = self._tickets.get(ticket)
        return record.held if record is not None else 0

    def _slots(self, sequence: Sequence, tokens: int | None = None) -> torch.Tensor:
        """The page slot of each of the first `tokens` tokens, or of each given one: int64 [tokens]."""
        size = self._engine.scheduler.layout.block_size
        blocks = torch.tensor(sequence.block_table, dtype=torch.int64)
        return (blocks[:, None] * size + torch.arange(size)).flatten()[
            : sequence.num_given if tokens is None else tokens
        ]
