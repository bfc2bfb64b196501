"""Pulls: a prefill worker takes the KV of a prompt's beginning from the decode worker, over the link's other direction.

On the prefill side the sequence waits out of the batch: first for the decode worker's grant, which says how much is
there, then for the KV. If either takes too long, or fails, the rest is computed as ever. On the decode side the blocks
are lent: they keep a reference of their own until the link has let go, whatever becomes of the ticket meanwhile.

Everything here runs in the engine loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog
import torch

from pdserve.core.sequence import Sequence
from pdserve.engine.engine import Engine
from pdserve.engine.scheduler import Phase
from pdserve.policy.pull import PullDecision, choose_pull
from pdserve.policy.transfer_plan import Wire
from pdserve.transfer.messages import (
    Granted,
    KvReady,
    PullWanted,
    ReceiveFailed,
    Revoked,
    TransferEvent,
    pull_of,
    pulled_ticket,
)
from pdserve.worker.send_links import SendLinks

log = structlog.get_logger(__name__)


class PullLinks(SendLinks, Protocol):
    """What pulls need of the hub of links; see transfer.hub.LinkHub."""

    def measured(self, peer: str) -> tuple[float, float]: ...
    def refuse(self, ticket: str, attempt: int, peer: str, reason: str) -> None: ...
    def grant(
        self, ticket: str, attempt: int, peer: str, slots: torch.Tensor, num_tokens: int, tokens_held: int
    ) -> None: ...
    def revoke(self, ticket: str, reason: str) -> None: ...


@dataclass(slots=True)
class _Pull:
    sequence: Sequence
    attempt: int
    peer: str
    deadline: float
    end: int = 0  # of what comes, in tokens; 0: not granted yet
    stopping: bool = False  # revoked; its ack is to come


class Pulls:
    """Both sides of one engine's pulls. `slots` gives the page slot of each given token of a sequence, `held` how many
    leading tokens of a reservation have KV that no attempt writes any more."""

    def __init__(
        self,
        engine: Engine,
        links: PullLinks,
        slots: Callable[[Sequence], torch.Tensor],
        held: Callable[[str], int],
    ) -> None:
        self._engine, self._links, self._slots, self._held = engine, links, slots, held
        self.tokens = self.given_up = 0  # tokens that were pulled, and pulls that were granted or awaited in vain
        self._pulls: dict[str, _Pull] = {}

    # The prefill side.

    def consider(self, sequence: Sequence, peer: str, peer_holds: int) -> PullDecision:
        """Whether to pull what `peer` probably holds of a prompt, and this worker does not."""
        layout = self._engine.scheduler.layout
        start, end = sequence.num_computed, self._usable(sequence, peer_holds)
        if end <= start:
            return PullDecision(False, "nothing is missing here")
        rate, round_trip = self._links.measured(peer)
        return choose_pull(
            tokens=end - start,
            size=layout.num_layers * Wire.of(layout).bytes(start, end - start),
            bytes_per_second=rate,
            round_trip=round_trip,
            tokens_per_second=self._engine.prefill_rate,
        )

    def begin(self, sequence: Sequence, attempt: int, peer: str, decision: PullDecision, now: float) -> None:
        """Take a sequence out of the batch until its pull came, failed, or took too long. The grant must be told."""
        self._engine.scheduler.set_phase(sequence, Phase.AWAITING_KV)
        self._pulls[sequence.id] = _Pull(sequence, attempt, peer, now + decision.patience)

    def active(self, ticket: str) -> bool:
        """Whether a link may still write into this ticket's pages, or the ticket waits for it to."""
        return ticket in self._pulls

    def stop(self, ticket: str, reason: str) -> None:
        """Call a pull off; once `active` says no more, its pages are quiet. Its ack is the pull's Revoked."""
        pull = self._pulls[ticket]
        if not pull.stopping:
            pull.stopping = True
            self._links.revoke(pull_of(ticket, pull.attempt), reason)

    @property
    def deadline(self) -> float | None:
        """When the next pull is to be given up, on the monotonic clock."""
        return min((pull.deadline for pull in self._pulls.values() if not pull.stopping), default=None)

    def give_up_late(self, now: float) -> None:
        """Compute what took too long."""
        for ticket, pull in self._pulls.items():
            if pull.deadline <= now and not pull.stopping:
                self.given_up += 1
                log.warning("pull_given_up", ticket=ticket, peer=pull.peer, granted=pull.end > 0)
                self.stop(ticket, "it took too long")

    # Both.

    def on_event(self, event: TransferEvent) -> str | None:
        """Take in what a link said about a pull. The ticket that may go on now, or end, if there is one."""
        match event:
            case Granted(ticket, attempt, held):
                return self._on_grant(ticket, attempt, held)
            case PullWanted():
                self._lend(event)
                return None
            case KvReady(name):
                return self._landed(name, None)
            case ReceiveFailed(name, _, reason, landed):
                pull = self._pulls.get(pulled_ticket(name))
                self.given_up += pull is not None and not pull.stopping
                log.warning("pull_failed", ticket=name, reason=reason, landed=landed)
                return self._landed(name, landed)
            case Revoked(name, landed):
                return self._landed(name, landed)
            case _:  # whatever the end of sending was: the link has let go
                self._engine.scheduler.take_back(event.ticket)
                return None

    def _on_grant(self, ticket: str, attempt: int, held: int) -> str | None:
        pull = self._pulls.get(ticket)
        if pull is None or pull.stopping or pull.end or pull.attempt != attempt:
            return None
        end = self._usable(pull.sequence, held)
        if end <= pull.sequence.num_computed:
            log.info("pull_needless", ticket=ticket, peer=pull.peer, held=held)
            return self._resume(ticket)
        pull.end = end
        slots = self._slots(pull.sequence)[:end]
        self._links.grant(pull_of(ticket, attempt), attempt, pull.peer, slots, end, pull.sequence.num_computed)
        return None

    def _landed(self, name: str, landed: int | None) -> str | None:
        """A pull is over; its first `landed` tokens are there (None: all)."""
        ticket = pulled_ticket(name)
        pull = self._pulls.get(ticket)
        if pull is None or pull_of(ticket, pull.attempt) != name:
            return None
        there = pull.end if landed is None else min(pull.end, landed)
        count = there - pull.sequence.num_computed
        if count > 0:
            self._engine.scheduler.computed(pull.sequence, count)
            pull.sequence.num_cached = pull.sequence.num_computed
            pull.sequence.num_pulled = count
            self.tokens += count
            for layer in range(self._engine.scheduler.layout.num_layers):
                self._links.advance([(ticket, pull.sequence.num_computed)], layer)
        return self._resume(ticket)

    def _resume(self, ticket: str) -> str:
        pull = self._pulls.pop(ticket)
        found = self._engine.scheduler.get(ticket)
        if found is not None and found[1] is Phase.AWAITING_KV:  # else it is over, and waits for its links
            self._engine.scheduler.set_phase(pull.sequence, Phase.RUNNING)
        return ticket

    def _lend(self, wanted: PullWanted) -> None:
        ticket, scheduler = pulled_ticket(wanted.ticket), self._engine.scheduler
        if scheduler.lends(wanted.ticket):
            return  # it was asked for twice
        found, held = scheduler.get(ticket), self._held(ticket)
        if found is None or not 0 <= wanted.start < wanted.end <= held:
            reason = f"tokens {wanted.start} to {wanted.end} are wanted, {held} are held"
            self._links.refuse(wanted.ticket, wanted.attempt, wanted.peer, reason)
            return
        sequence = found[0]
        scheduler.lend(wanted.ticket, sequence.block_table[: scheduler.layout.blocks_for(wanted.end)])
        slots = self._slots(sequence)[: wanted.end]
        self._links.start_send(wanted.ticket, wanted.attempt, wanted.peer, slots, wanted.end)
        for layer in range(scheduler.layout.num_layers):
            self._links.advance([(wanted.ticket, wanted.end)], layer)
        self._links.finish_send(wanted.ticket, 0)

    def _usable(self, sequence: Sequence, held: int) -> int:
        """How many leading tokens of `held` ones are worth having: whole blocks, and never the last token, whose logits
        are needed."""
        size = self._engine.scheduler.layout.block_size
        return min(held, sequence.num_given - 1) // size * size
