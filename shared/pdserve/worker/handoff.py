"""Where the engine and the links meet: whose pages a link may touch, and when a ticket is over.

Everything here runs in the engine loop. The rule that keeps pages safe: while a link may read or write a ticket's
pages, the ticket keeps them; it is finished only by the link's own word (committed, stopped, failed, revoked).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listed
from typing import Protocol

import torch

from pdserve.core.errors import NoCapacity
from pdserve.core.sequence import EndReason, Sequence, SequenceSpec
from pdserve.engine.engine import Engine, Outputs
from pdserve.engine.scheduler import Phase
from pdserve.transfer.messages import (
    KvReady,
    ReceiveFailed,
    Revoked,
    SendCommitted,
    SendFailed,
    SendStopped,
    TransferEvent,
)
from pdserve.worker.messages import KvCommitted, Reserve, ReservedPages, StartPrefill, TicketReady

Tickets = Listed[tuple[str, int]]


class Links(Protocol):
    """What the hand-off needs of the hub of links; see transfer.hub.LinkHub."""

    def start_send(self, ticket: str, attempt: int, peer: str, slots: torch.Tensor, num_tokens: int) -> None: ...
    def advance(self, tickets: Tickets, layer: int) -> None: ...
    def finish_send(self, ticket: str, first_token: int) -> None: ...
    def stop_send(self, ticket: str) -> None: ...
    def grant(
        self, ticket: str, attempt: int, peer: str, slots: torch.Tensor, num_tokens: int, tokens_held: int
    ) -> None: ...
    def revoke(self, ticket: str, reason: str) -> None: ...


class Handoff:
    """Tickets of one engine, on both sides of the wire."""

    def __init__(
        self, engine: Engine, links: Links, send: Callable[[ReservedPages | TicketReady | KvCommitted], None]
    ) -> None:
        self._engine, self._links, self._send = engine, links, send
        # Tickets that wait for a link to let go, with what is to be said then (None: it was said already).
        self._closing: dict[str, tuple[EndReason | None, str]] = {}

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
        self._links.start_send(ticket, message.attempt, message.peer, self._slots(sequence), sequence.num_given)
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
        self._send(ReservedPages(ticket, message.attempt, sequence.num_cached))
        if peer is not None:
            slots = self._slots(sequence)
            self._links.grant(ticket, message.attempt, peer, slots, sequence.num_given, sequence.num_cached)

    def close(self, ticket: str, reason: EndReason, detail: str = "") -> None:
        """End a ticket from outside (cancelled, deadline). One that is unknown, or closing already, is left alone."""
        found = self._engine.scheduler.get(ticket)
        if found is None or ticket in self._closing:
            return
        _, phase = found
        if phase is Phase.AWAITING_KV:
            self._wait_for_link(ticket, reason, detail)
            self._links.revoke(ticket, reason)
        elif self._engine.hands_off(ticket):
            self._wait_for_link(ticket, reason, detail)
            self._links.stop_send(ticket)
        else:
            self._finish(ticket, reason, detail)

    def closing(self, ticket: str) -> bool:
        """Whether a ticket is over, and only waits for its link to let go."""
        return ticket in self._closing

    def after_step(self, outputs: Outputs) -> None:
        """Commit the prompts that a step completed; where the answer ended with its first token, call the link off."""
        for done in outputs.prompts:
            found = self._engine.scheduler.get(done.ticket)
            if found is None or not self._engine.hands_off(done.ticket):
                continue
            sequence, phase = found
            if phase is Phase.SENDING_KV:
                self._links.finish_send(done.ticket, sequence.tokens[-1])
            else:
                self._closing[done.ticket] = (None, "")
                self._links.stop_send(done.ticket)

    def on_event(self, event: TransferEvent) -> None:
        """Take in what a link said about a ticket."""
        match event:
            case Revoked(ticket) | SendStopped(ticket):
                if ticket in self._closing:
                    self._finish(ticket, *self._closing.pop(ticket))
            case _ if event.ticket in self._closing or event.ticket not in self._engine.scheduler:
                pass  # its ack is on the way
            case KvReady(ticket, attempt, first_token, kv_bytes):
                self._send(TicketReady(ticket, attempt, kv_bytes))
                self._engine.activate(ticket, first_token)
            case SendCommitted(ticket, kv_bytes):
                self._send(KvCommitted(ticket, kv_bytes))
                self._finish(ticket, EndReason.LENGTH, "handed off")
            case ReceiveFailed(ticket, _, reason) | SendFailed(ticket, reason):
                self._finish(ticket, EndReason.TRANSFER_FAILED, reason)

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

    def _finish(self, ticket: str, reason: EndReason | None, detail: str) -> None:
        self._engine.finish(ticket, reason, detail)

    def _slots(self, sequence: Sequence) -> torch.Tensor:
        """The page slot of each given token: int64 [num_given]."""
        size = self._engine.scheduler.layout.block_size
        blocks = torch.tensor(sequence.block_table, dtype=torch.int64)
        return (blocks[:, None] * size + torch.arange(size)).flatten()[: sequence.num_given]
