"""The prefill side of all links: tickets whose pages are being sent, from first layer to Committed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch

from pdserve.core.errors import IntegrityError
from pdserve.policy.transfer_plan import Wire
from pdserve.transfer.attempts import Outgoing
from pdserve.transfer.common import Common
from pdserve.transfer.link import Link
from pdserve.transfer.messages import (
    PULL_SUFFIX,
    Grant,
    Granted,
    PullWanted,
    SendCommitted,
    SendFailed,
    SendStopped,
    TicketClosed,
    TransferEvent,
)
from pdserve.transfer.pages import queued_work

MAX_EARLY = 4096  # grants and ends that came before their ticket; the oldest are forgotten


class Sends:
    """`start`, `advance`, `finish` and `stop` take the lock; the others are called with it held."""

    def __init__(self, common: Common, links: Mapping[str, Link]) -> None:
        self._common, self._links = common, links
        self._wire = Wire.of(common.layout)
        self._early: OrderedDict[tuple[str, str], Grant | TicketClosed] = OrderedDict()

    def start(
        self,
        ticket: str,
        attempt: int,
        peer: str,
        slots: torch.Tensor | Sequence[int],
        num_tokens: int,
        tells_grant: bool = False,
        tells_landed: bool = False,
    ) -> None:
        common = self._common
        layers = common.layout.num_layers
        out = Outgoing(
            ticket=ticket,
            attempt=attempt,
            peer=peer,
            slots=torch.as_tensor(slots, dtype=torch.int64).to(common.kv.device),
            end=num_tokens,
            computed=[0] * layers,
            sent=[0] * layers,
            events=[None] * layers,
            tells_grant=tells_grant,
            tells_landed=tells_landed,
        )
        with common.lock:
            if common.outgoing.get(ticket) is not None:
                raise IntegrityError(f"ticket {ticket} is being sent already")
            common.outgoing.add(out)
            early = self._early.get((peer, ticket))
            if early is not None and early.attempt <= attempt:  # a newer attempt's is for when that one starts
                del self._early[peer, ticket]
            match early:
                case Grant(_, granted) as grant if granted == attempt:
                    self._apply(out, grant)
                case Grant(_, granted) if granted > attempt:
                    self._end(out, SendFailed(ticket, f"attempt {granted} took its place"))
                case TicketClosed(_, ended, reason) if ended >= attempt:
                    self._end(out, SendFailed(ticket, reason))
                case _ if ticket.endswith(PULL_SUFFIX):  # it was wanted by a grant, which went with its link
                    self._end(out, SendFailed(ticket, "the link on which it was wanted is gone"))
        common.wire.flush()

    def advance(self, tickets: Sequence[tuple[str, int]], layer: int) -> None:
        common = self._common
        event = queued_work(common.kv.device)
        last = layer == common.layout.num_layers - 1
        with common.lock:
            for ticket, tokens in tickets:
                out = common.outgoing.get(ticket)
                if out is None or out.over:
                    continue
                tokens = min(tokens, out.end)
                out.unseen += (tokens - out.computed[layer]) * common.layout.layer_token_bytes
                self._produced(out, out.computed[layer], tokens)
                out.computed[layer], out.events[layer] = tokens, event
                if out.granted and (last or out.unseen >= common.settings.target_bytes):
                    out.unseen = 0
                    if (link := self._links.get(out.peer)) is not None:
                        link.sender.wake()

    def finish(self, ticket: str, first_token: int) -> None:
        common = self._common
        with common.lock:
            out = common.outgoing.get(ticket)
            if out is not None and not out.over:
                out.first_token, out.computed_at = first_token, common.clock()
                if (link := self._links.get(out.peer)) is not None:
                    link.sender.settle(out)
                    link.sender.wake()
        common.wire.flush()

    def stop(self, ticket: str) -> None:
        common = self._common
        with common.lock:
            out = common.outgoing.get(ticket)
            if out is None:
                common.notify(SendStopped(ticket))
            else:
                if not out.over:
                    self._tell_closed(out, "the sender stopped")
                self._end(out, SendStopped(ticket))
        common.wire.flush()

    def refuse(self, ticket: str, attempt: int, peer: str, reason: str) -> None:
        """Nothing will be sent for a grant that came before its ticket."""
        with self._common.lock:
            self._early.pop((peer, ticket), None)
            if (link := self._links.get(peer)) is not None:
                link.post(TicketClosed(ticket, attempt, reason))
        self._common.wire.flush()

    def on_grant(self, peer: str, grant: Grant) -> None:
        """The peer's pages are there; the ticket may still be to come."""
        out = self._common.outgoing.live(grant.ticket, grant.attempt, peer)
        if out is None:
            self._keep(peer, grant)
            if grant.ticket.endswith(PULL_SUFFIX):
                pull = PullWanted(grant.ticket, grant.attempt, peer, grant.tokens_held, grant.tokens_end)
                self._common.notify(pull)
        else:
            self._apply(out, grant)

    def on_committed(self, peer: str, ticket: str, attempt: int) -> None:
        out = self._common.outgoing.live(ticket, attempt, peer)
        if out is None or not out.committed:
            return
        now, counters = self._common.clock(), self._common.counters
        seconds = now - out.began if out.began else 0.0
        exposed = min(seconds, now - out.computed_at)
        if not ticket.endswith(PULL_SUFFIX):  # a pull hides behind nothing, and is not meant to
            counters.transfers += 1
            counters.transfer_seconds += seconds
            counters.exposed_seconds += exposed
        self._end(out, SendCommitted(ticket, out.kv_bytes, seconds, exposed, now))

    def on_closed(self, peer: str, closed: TicketClosed) -> None:
        """The peer wants no more of a ticket, which may still be to come."""
        out = self._common.outgoing.live(closed.ticket, closed.attempt, peer)
        if out is None:
            self._keep(peer, closed)
        else:
            self._end(out, SendFailed(closed.ticket, closed.reason))

    def fail(self, peer: str, reason: str) -> None:
        """There is no link to a peer any more."""
        for out in self._common.outgoing.of(peer):
            self._end(out, SendFailed(out.ticket, reason))
        for key in [key for key in self._early if key[0] == peer]:
            del self._early[key]

    def _keep(self, peer: str, message: Grant | TicketClosed) -> None:
        """Keep what came before its ticket did: of the newest attempt, and its end rather than its grant."""
        key = (peer, message.ticket)
        kept = self._early.get(key)
        if kept is not None and kept.attempt > message.attempt:
            return  # as the answer to an older attempt's commit, which crossed the newer one's grant
        if isinstance(kept, TicketClosed) and kept.attempt == message.attempt:
            return
        self._early[key] = message
        self._early.move_to_end(key)
        if len(self._early) > MAX_EARLY:
            self._early.popitem(last=False)

    def _apply(self, out: Outgoing, grant: Grant) -> None:
        link, tokens_held = self._links.get(out.peer), grant.tokens_held
        if link is None or out.granted:
            return
        if not 0 <= tokens_held <= out.end or grant.tokens_end not in (0, out.end):
            reason = f"tokens {tokens_held} to {grant.tokens_end or out.end} are wanted of {out.end}"
            self._tell_closed(out, reason)
            self._end(out, SendFailed(out.ticket, reason))
            return
        out.granted, out.held = True, tokens_held
        for computed in out.computed:
            self._produced(out, 0, computed)
        link.used = self._common.clock()
        out.sent = [tokens_held] * len(out.sent)
        link.sender.admit(out)
        if out.tells_grant:
            self._common.notify(Granted(out.ticket, out.attempt, tokens_held))

    def _produced(self, out: Outgoing, start: int, end: int) -> None:
        """Count what is there now and has to be sent, as it weighs on the wire."""
        start = max(start, out.held)
        if out.granted and end > start and not out.ticket.endswith(PULL_SUFFIX):
            self._common.counters.bytes_produced += self._wire.bytes(start, end - start)

    def _tell_closed(self, out: Outgoing, reason: str) -> None:
        if (link := self._links.get(out.peer)) is not None:
            link.post(TicketClosed(out.ticket, out.attempt, reason))

    def _end(self, out: Outgoing, event: TransferEvent) -> None:
        self._common.counters.send_aborts += not (out.over or isinstance(event, SendCommitted))
        if (link := self._links.get(out.peer)) is not None:
            link.sender.drop(out.ticket)
        self._common.outgoing.end(out, lambda: self._common.notify(event))
