"""Moves: running sequences of a decode worker go on at another one, which gets their KV over a link.

A move sends in two attempts. The first carries what has KV when it begins, while the sequence decodes on; when all of
it has landed the sequence is detached, and the second carries what was added meanwhile, and the last token. So the
answer pauses for the tail alone, and whatever fails before that costs it nothing. What fails later does not cost it its
KV: it goes on here.

The pages that a link reads are lent to the move: they keep a reference of their own until the link has let go, whatever
becomes of the sequence meanwhile. Everything here runs in the engine loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from pdserve.core.sequence import EndReason, Sequence
from pdserve.core.ticket import Ticket, TicketEvent, TicketState
from pdserve.engine.engine import Engine
from pdserve.engine.scheduler import Phase
from pdserve.transfer.messages import SendCommitted, SendFailed, SendLanded, SendStopped, TransferEvent
from pdserve.worker.messages import Detached, HandOff, HandOffFailed
from pdserve.worker.send_links import SendLinks


class MoveLinks(SendLinks, Protocol):
    """What moves need of the hub of links; see transfer.hub.LinkHub."""

    def stop_send(self, ticket: str) -> None: ...


@dataclass(slots=True)
class _Move:
    """`name` is what the sequence is called where it goes. `sequence` None: it is over or stays, and only the link is
    waited for."""

    name: str
    attempt: int
    peer: str
    record: Ticket
    sequence: Sequence | None
    detached: bool = False
    final: bool = False  # the second attempt is on its way
    kv_bytes: int = 0


class Moves:
    """The moves of one engine. `slots` gives the page slots of a sequence's first tokens."""

    def __init__(
        self,
        engine: Engine,
        links: MoveLinks,
        slots: Callable[[Sequence, int], torch.Tensor],
        send: Callable[[Detached | HandOffFailed], None],
    ) -> None:
        self._engine, self._links, self._slots, self._send = engine, links, slots, send
        self.completed = self.kv_bytes = 0  # sequences that others took over, and the bytes of their KV
        self._moves: dict[str, _Move] = {}  # by name
        self._names: dict[str, str] = {}  # by ticket, while its sequence is on the way

    def owns(self, name: str) -> bool:
        """Whether a link's word on `name` is about a move."""
        return name in self._moves

    def begin(self, message: HandOff, record: Ticket | None) -> None:
        """Send what has KV already, or say why not. A ticket that is unknown or over gets no answer: its end was
        told."""
        found = self._engine.scheduler.get(message.ticket)
        if found is None or record is None or record.over:
            return
        sequence, phase = found
        if problem := self._problem(message, record, sequence, phase):
            self._send(HandOffFailed(message.ticket, message.new_ticket, problem))
            return
        move = _Move(message.new_ticket, message.attempt, message.peer, record, sequence)
        self._moves[move.name], self._names[sequence.id] = move, move.name
        self._start(move, sequence, message.tokens, tells_landed=True)

    def call_off(self, ticket: str, name: str, reason: str = "") -> None:
        """Let a sequence go on here. Where `reason` is given it is told."""
        move = self._moves.get(name)
        if move is None or move.sequence is None or move.sequence.id != ticket:
            return
        self._stay(move, reason)
        self._links.stop_send(name)

    def drop(self, ticket: str) -> None:
        """A sequence is over, or is about to be; one that does not move is nothing."""
        if (name := self._names.pop(ticket, None)) is not None:
            self._moves[name].sequence = None
            self._links.stop_send(name)

    def on_event(self, event: TransferEvent) -> None:
        """Take in what a link said about a move."""
        move = self._moves[event.ticket]
        sequence = move.sequence
        match event:
            case SendLanded(_, kv_bytes):
                if sequence is not None and not move.detached:
                    move.kv_bytes += kv_bytes
                    self._detach(move, sequence)
            case SendCommitted(_, kv_bytes):
                self._forget(move)
                if sequence is not None:
                    self.completed += 1
                    self.kv_bytes += move.kv_bytes + kv_bytes
                    self._engine.finish(sequence.id, EndReason.HANDED_OFF, f"to {move.peer}")
            case SendFailed() if sequence is not None and move.detached and not move.final:
                # The other worker has fenced the first attempt, or its link is gone: the second waits for its grant.
                self._engine.scheduler.take_back(move.name)
                self._finish(move, sequence)
            case SendFailed(_, reason):
                if sequence is not None:
                    self._stay(move, reason)
                self._forget(move)
            case SendStopped():
                self._forget(move)

    def _problem(self, message: HandOff, record: Ticket, sequence: Sequence, phase: Phase) -> str:
        """Why a sequence cannot be handed off now, if there is anything."""
        if record.id in self._names:
            return "it is being handed off already"
        if message.new_ticket in self._moves or message.new_ticket in self._engine.scheduler:
            return "its new ticket is here already"
        if phase is not Phase.RUNNING or record.state is not TicketState.DECODING or sequence.in_prefill:
            return "it does not decode yet"
        if not sequence.spec.prompt_len <= message.tokens <= sequence.num_computed:
            return f"{message.tokens} tokens are to be sent, {sequence.num_computed} have KV"
        return ""

    def _detach(self, move: _Move, sequence: Sequence) -> None:
        self._engine.detach(sequence.id)
        move.record.on(TicketEvent.HAND_OFF)
        move.detached = True
        self._send(Detached(sequence.id, move.name, len(sequence.tokens)))

    def _finish(self, move: _Move, sequence: Sequence) -> None:
        """Send what the first attempt left, and commit."""
        move.final, move.attempt = True, move.attempt + 1
        self._start(move, sequence, sequence.num_computed)
        self._links.finish_send(move.name, sequence.tokens[-1])

    def _start(self, move: _Move, sequence: Sequence, tokens: int, *, tells_landed: bool = False) -> None:
        scheduler = self._engine.scheduler
        scheduler.lend(move.name, sequence.block_table[: scheduler.layout.blocks_for(tokens)])
        slots = self._slots(sequence, tokens)
        self._links.start_send(move.name, move.attempt, move.peer, slots, tokens, tells_landed=tells_landed)
        for layer in range(scheduler.layout.num_layers):
            self._links.advance([(move.name, tokens)], layer)

    def _stay(self, move: _Move, reason: str) -> None:
        """The sequence of a move goes on here; its next tokens go into slots that no link reads."""
        assert move.sequence is not None
        ticket, move.sequence = move.sequence.id, None
        del self._names[ticket]
        if move.detached:
            self._engine.resume(ticket)
            move.record.on(TicketEvent.RESUME)
        if reason:
            self._send(HandOffFailed(ticket, move.name, reason))

    def _forget(self, move: _Move) -> None:
        """The link has let go."""
        self._engine.scheduler.take_back(move.name)
        del self._moves[move.name]
        if move.sequence is not None:
            self._names.pop(move.sequence.id, None)
