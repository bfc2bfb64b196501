"""The decode side of all links: tickets whose pages a peer may fill, from the grant to KvReady."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pdserve.core.ticket import Landing
from pdserve.transfer.attempts import Incoming
from pdserve.transfer.common import Common
from pdserve.transfer.link import Link
from pdserve.transfer.messages import Grant, Revoked, TicketClosed
from pdserve.transfer.pages import queued_work


class Receives:
    """`grant` and `revoke` take the lock; the others are called with it held."""

    def __init__(self, common: Common, links: Mapping[str, Link]) -> None:
        self._common, self._links = common, links

    def grant(
        self,
        ticket: str,
        attempt: int,
        peer: str,
        slots: torch.Tensor | Sequence[int],
        num_tokens: int,
        tokens_held: int,
    ) -> None:
        common = self._common
        incoming = Incoming(
            ticket=ticket,
            attempt=attempt,
            peer=peer,
            slots=torch.as_tensor(slots, dtype=torch.int64).to(common.kv.device),
            landing=Landing(common.layout.num_layers, tokens_held, num_tokens),
            after=queued_work(common.kv.device),
        )
        with common.lock:
            old = common.incoming.get(ticket)
            if old is None:
                self._admit(incoming)
            else:
                self._tell_closed(old, "a new attempt took its place")
                common.incoming.end(old, lambda: self._admit(incoming))
        common.wire.flush()

    def revoke(self, ticket: str, reason: str) -> None:
        common = self._common
        with common.lock:
            incoming = common.incoming.get(ticket)
            if incoming is None:
                common.notify(Revoked(ticket))
            else:
                if not incoming.over:
                    common.counters.receive_aborts += 1
                    self._tell_closed(incoming, reason)
                common.incoming.end(incoming, lambda: common.notify(Revoked(ticket, incoming.landing.whole)))
        common.wire.flush()

    def on_link(self, link: Link) -> None:
        """A link is coming up: grant what waited for it."""
        for incoming in self._common.incoming.of(link.peer):
            self._post_grant(link, incoming)

    def on_closed(self, peer: str, closed: TicketClosed) -> bool:
        """The sender gave up. Whether there was something to give up."""
        incoming = self._common.incoming.live(closed.ticket, closed.attempt, peer)
        if incoming is None:
            return False
        self._common.fail_incoming(incoming, closed.reason)
        return True

    def fail(self, peer: str, reason: str) -> None:
        """There is no link to a peer any more."""
        for incoming in self._common.incoming.of(peer):
            self._common.fail_incoming(incoming, reason)

    def _admit(self, incoming: Incoming) -> None:
        self._common.incoming.add(incoming)
        if (link := self._links.get(incoming.peer)) is not None:
            self._post_grant(link, incoming)

    def _post_grant(self, link: Link, incoming: Incoming) -> None:
        link.used = self._common.clock()
        landing = incoming.landing
        link.post(Grant(incoming.ticket, incoming.attempt, landing.first, landing.end))

    def _tell_closed(self, incoming: Incoming, reason: str) -> None:
        if (link := self._links.get(incoming.peer)) is not None:
            link.post(TicketClosed(incoming.ticket, incoming.attempt, reason))
