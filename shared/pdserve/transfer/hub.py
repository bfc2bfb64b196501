"""All links of one engine process, as its loop and its link control see them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from pdserve.core.errors import ConfigError, IntegrityError, PdserveError
from pdserve.core.layout import KVLayout
from pdserve.core.ticket import Landing, Ticket
from pdserve.transfer.attempts import Incoming, Outgoing
from pdserve.transfer.common import Common, LinkSettings, Wire
from pdserve.transfer.link import Endings, Link
from pdserve.transfer.messages import (
    Announce,
    Commit,
    Committed,
    ControlMessage,
    Credit,
    Grant,
    ReceiveFailed,
    Revoked,
    SendCommitted,
    SendFailed,
    SendStopped,
    StoreSet,
    TicketClosed,
    TransferEvent,
)
from pdserve.transfer.pages import KVPages
from pdserve.transfer.ring import Ring, RingPool
from pdserve.transfer.transport import LinkLost

__all__ = ["LinkHub", "LinkSettings"]

MAX_EARLY = 4096  # grants and ends that came before their ticket; the oldest are forgotten


class LinkHub:
    """Sends KV pages to peers and receives it from them, a layer at a time.

    `send_control`, `established`, `closed` and `notify` are called from link threads too; they must not call back, and
    `notify` must not wait. No method waits for a link. Raises ConfigError for sizes that hold no token of a layer.
    """

    def __init__(
        self,
        kv: KVPages,
        layout: KVLayout,
        settings: LinkSettings,
        *,
        send_control: Callable[[str, int, ControlMessage], None],
        established: Callable[[str, int], None],
        closed: Callable[[str, int, str], None],
        notify: Callable[[TransferEvent], None],
    ) -> None:
        if min(settings.frame_bytes, settings.ring_bytes // 2) < layout.layer_token_bytes:
            raise ConfigError(
                f"frame_bytes {settings.frame_bytes} or ring_bytes {settings.ring_bytes} is too small: "
                f"a token of a layer has {layout.layer_token_bytes} bytes, and the ring holds two frames or more"
            )
        self._common = Common(kv, layout, settings, Wire(send_control), notify)
        self._established, self._closed = established, closed
        self._links: dict[str, Link] = {}
        self._ended: dict[str, int] = {}  # the epoch of each peer's last link
        self._leaving: list[tuple[float, Link]] = []
        self._rings: dict[torch.device, RingPool] = {}
        self._early: OrderedDict[tuple[str, str], Grant | TicketClosed] = OrderedDict()

    # Links; called from the thread that reads link control.

    def open(self, peer: str, epoch: int, initiator: bool, transport: str) -> None:
        """Make the data half of a link whose control half is up: then `established`, or `closed` with the reason."""
        common = self._common
        problem = ""
        with common.lock:
            if (old := self._links.get(peer)) is not None:
                self._end_link(old, "a newer link to this worker took its place")
            ring: Ring | None = None
            try:
                ring = self._ring_pool(transport).lease() if common.settings.receives else None
            except PdserveError as error:
                problem = str(error)
                self._ended[peer] = epoch
                self._fail_attempts(peer, problem)
            else:
                link = Link(common, peer, epoch, initiator, transport, ring, self._endings(transport))
                self._links[peer] = link
                for incoming in common.incoming.of(peer):
                    link.post(_grant_of(incoming))
                link.start()
        if problem:
            self._closed(peer, epoch, problem)
        common.wire.flush()

    def on_control(self, peer: str, epoch: int, message: ControlMessage) -> None:
        """Take in a control message; one of a link that is gone is dropped."""
        common = self._common
        problem = ""
        with common.lock:
            link = self._links.get(peer)
            if link is None or link.epoch != epoch:
                return
            try:
                self._dispatch(link, message)
            except LinkLost as error:
                problem = str(error)
        if problem:
            self._broke(link, problem)
        common.wire.flush()

    def close(self, peer: str, epoch: int, reason: str) -> None:
        """The control half is gone, or never came up: every attempt on the link fails at once."""
        with self._common.lock:
            link = self._links.get(peer)
            if link is not None and link.epoch == epoch:
                self._end_link(link, reason)
            elif link is None and self._ended.get(peer) != epoch:  # not the echo of an end that the hub announced
                self._ended[peer] = epoch
                self._fail_attempts(peer, reason)

    # The prefill side; called from the engine loop.

    def start_send(
        self, ticket: str, attempt: int, peer: str, slots: torch.Tensor | Sequence[int], num_tokens: int
    ) -> None:
        """Send `num_tokens` tokens' KV to `peer`, once it grants them and as they are computed.

        `slots` is each token's page slot. The pages must stay until SendCommitted, SendFailed or SendStopped. Where
        there is no link it is waited for. Raises IntegrityError for a ticket that is being sent already.
        """
        common = self._common
        layers = common.layout.num_layers
        out = Outgoing(
            ticket=ticket,
            attempt=attempt,
            peer=peer,
            slots=self._on_device(slots),
            end=num_tokens,
            computed=[0] * layers,
            sent=[0] * layers,
            events=[None] * layers,
        )
        with common.lock:
            if common.outgoing.get(ticket) is not None:
                raise IntegrityError(f"ticket {ticket} is being sent already")
            common.outgoing.add(out)
            match self._early.pop((peer, ticket), None):
                case Grant(_, granted, held) if granted == attempt:
                    self._apply_grant(out, held)
                case TicketClosed(_, ended, reason) if ended >= attempt:
                    self._fail_send(out, reason)
        common.wire.flush()

    def advance(self, tickets: Sequence[tuple[str, int]], layer: int) -> None:
        """Say how many tokens of each ticket have their KV of `layer` now (on a GPU: after the work queued so far).

        Called once a layer in the layer loop, so it only notes; senders are woken when a frame's worth has come
        together, and at the last layer. Tickets that are not being sent are skipped.
        """
        common = self._common
        event = self._event()
        last = layer == common.layout.num_layers - 1
        with common.lock:
            for ticket, tokens in tickets:
                out = common.outgoing.get(ticket)
                if out is None or out.over:
                    continue
                tokens = min(tokens, out.end)
                out.unseen += (tokens - out.computed[layer]) * common.layout.layer_token_bytes
                out.computed[layer], out.events[layer] = tokens, event
                if out.granted and (last or out.unseen >= common.settings.target_bytes):
                    out.unseen = 0
                    if (link := self._links.get(out.peer)) is not None:
                        link.sender.wake()

    def finish_send(self, ticket: str, first_token: int) -> None:
        """Everything is computed, and so is the first token: commit after the last frame; then comes SendCommitted."""
        common = self._common
        with common.lock:
            out = common.outgoing.get(ticket)
            if out is not None and not out.over:
                out.first_token = first_token
                if (link := self._links.get(out.peer)) is not None:
                    link.sender.settle(out)
                    link.sender.wake()
        common.wire.flush()

    def stop_send(self, ticket: str) -> None:
        """Stop sending, and tell the peer. SendStopped follows in any case, for unknown tickets too."""
        common = self._common
        with common.lock:
            out = common.outgoing.get(ticket)
            if out is None:
                common.notify(SendStopped(ticket))
            else:
                self._tell_closed(out, "the sender stopped")
                self._end_send(out, SendStopped(ticket))
        common.wire.flush()

    # The decode side; called from the engine loop.

    def grant(
        self,
        ticket: str,
        attempt: int,
        peer: str,
        slots: torch.Tensor | Sequence[int],
        num_tokens: int,
        tokens_held: int,
    ) -> None:
        """Let `peer` fill pages: all of `num_tokens` tokens but the `tokens_held` leading ones.

        `slots` is each token's page slot. The pages must stay until KvReady, ReceiveFailed or Revoked. Where there is
        no link it is waited for. A new attempt silently takes the place of an older one, whose frames are dropped.
        """
        common = self._common
        incoming = Incoming(
            ticket=ticket,
            attempt=attempt,
            peer=peer,
            slots=self._on_device(slots),
            record=Ticket(ticket, attempt, Landing(common.layout.num_layers, tokens_held, num_tokens)),
            after=self._event(),
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
        """Take the pages back, and tell the peer. Revoked follows in any case, for unknown tickets too."""
        common = self._common
        with common.lock:
            incoming = common.incoming.get(ticket)
            if incoming is None:
                common.notify(Revoked(ticket))
            else:
                self._tell_closed(incoming, reason)
                common.incoming.end(incoming, lambda: common.notify(Revoked(ticket)))
        common.wire.flush()

    # Both.

    def stats(self) -> tuple[int, int]:
        """Bytes sent and received, all links together."""
        return self._common.bytes_sent, self._common.bytes_received

    @property
    def abandoned(self) -> int:
        """How many threads of closed links are stuck past their deadline."""
        now = time.monotonic()
        with self._common.lock:
            return sum(link.alive() for deadline, link in self._leaving if deadline < now)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the shares of the receive ring add up."""
        with self._common.lock:
            if not all(pool.check_integrity() for pool in self._rings.values()):
                raise IntegrityError("free and leased shares of the receive ring do not make up the pool")

    def shutdown(self) -> None:
        """End all links and wait for their threads, up to their deadline."""
        common = self._common
        with common.lock:
            for link in list(self._links.values()):
                self._end_link(link, "this worker is shutting down")
            for peer in {
                attempt.peer for book in (common.outgoing, common.incoming) for attempt in book.by_ticket.values()
            }:
                self._fail_attempts(peer, "this worker is shutting down")
            leaving = list(self._leaving)
        for deadline, link in leaving:
            link.join(max(0.0, deadline - time.monotonic()))

    # With the lock held.

    def _dispatch(self, link: Link, message: ControlMessage) -> None:
        match message:
            case StoreSet(key, value):
                link.store.put(key, value)
            case Credit(size):
                link.sender.add_credit(size)
            case Announce() | Commit():
                if link.receiver is None:
                    raise LinkLost("the peer sends, but this worker does not receive")
                link.receiver.put(message)
            case Grant():
                self._on_grant(link, message)
            case Committed(ticket, attempt):
                out = self._common.outgoing.live(ticket, attempt, link.peer)
                if out is not None and out.committed:
                    self._end_send(out, SendCommitted(ticket, out.kv_bytes))
            case TicketClosed():
                self._on_ticket_closed(link, message)

    def _on_grant(self, link: Link, grant: Grant) -> None:
        out = self._common.outgoing.live(grant.ticket, grant.attempt, link.peer)
        if out is not None:
            self._apply_grant(out, grant.tokens_held)
        else:
            self._keep(link.peer, grant)

    def _on_ticket_closed(self, link: Link, message: TicketClosed) -> None:
        ticket, attempt, reason = message.ticket, message.attempt, message.reason
        if (out := self._common.outgoing.live(ticket, attempt, link.peer)) is not None:
            self._fail_send(out, reason)
        elif (incoming := self._common.incoming.live(ticket, attempt, link.peer)) is not None:
            self._fail_receive(incoming, reason)
        else:
            self._keep(link.peer, message)

    def _keep(self, peer: str, message: Grant | TicketClosed) -> None:
        """Keep what came before its ticket did; of one attempt, its end outlasts its grant."""
        key = (peer, message.ticket)
        kept = self._early.get(key)
        if isinstance(kept, TicketClosed) and kept.attempt >= message.attempt:
            return
        self._early[key] = message
        self._early.move_to_end(key)
        if len(self._early) > MAX_EARLY:
            self._early.popitem(last=False)

    def _apply_grant(self, out: Outgoing, tokens_held: int) -> None:
        link = self._links.get(out.peer)
        if link is None or out.granted:
            return
        if not 0 <= tokens_held <= out.end:
            reason = f"{tokens_held} tokens are held of a prompt of {out.end}"
            self._tell_closed(out, reason)
            self._fail_send(out, reason)
            return
        out.granted = True
        out.sent = [tokens_held] * len(out.sent)
        link.sender.admit(out)

    def _admit(self, incoming: Incoming) -> None:
        self._common.incoming.add(incoming)
        if (link := self._links.get(incoming.peer)) is not None:
            link.post(_grant_of(incoming))

    def _tell_closed(self, attempt: Outgoing | Incoming, reason: str) -> None:
        if (link := self._links.get(attempt.peer)) is not None:
            link.post(TicketClosed(attempt.ticket, attempt.attempt, reason))

    def _end_send(self, out: Outgoing, event: TransferEvent) -> None:
        if (link := self._links.get(out.peer)) is not None:
            link.sender.drop(out.ticket)
        self._common.outgoing.end(out, lambda: self._common.notify(event))

    def _fail_send(self, out: Outgoing, reason: str) -> None:
        self._end_send(out, SendFailed(out.ticket, reason))

    def _fail_receive(self, incoming: Incoming, reason: str) -> None:
        failed = ReceiveFailed(incoming.ticket, incoming.attempt, reason)
        self._common.incoming.end(incoming, lambda: self._common.notify(failed))

    def _fail_attempts(self, peer: str, reason: str) -> None:
        for out in self._common.outgoing.of(peer):
            self._fail_send(out, reason)
        for incoming in self._common.incoming.of(peer):
            self._fail_receive(incoming, reason)
        for key in [key for key in self._early if key[0] == peer]:
            del self._early[key]

    def _end_link(self, link: Link, reason: str) -> None:
        """Fail what is on the link at once. Its threads come back later, and only then their buffers are free."""
        del self._links[link.peer]
        self._ended[link.peer] = link.epoch
        self._leaving = [(deadline, gone) for deadline, gone in self._leaving if gone.alive()]
        settings = self._common.settings
        self._leaving.append((time.monotonic() + settings.open_timeout + 2 * settings.frame_timeout, link))
        link.close(reason)
        self._fail_attempts(link.peer, reason)

    def _ring_pool(self, transport: str) -> RingPool:
        device = torch.device("cpu") if transport == "gloo" else self._common.kv.device
        if device not in self._rings:
            settings, unit = self._common.settings, self._common.layout.layer_token_bytes
            self._rings[device] = RingPool(settings.ring_bytes, settings.frame_bytes, unit, device)
        return self._rings[device]

    # Without it, from a link's threads.

    def _endings(self, transport: str) -> Endings:
        pool = self._ring_pool(transport)

        def give_back(ring: Ring) -> None:
            with self._common.lock:
                pool.give_back(ring)

        return Endings(lambda link: self._established(link.peer, link.epoch), self._broke, give_back)

    def _broke(self, link: Link, reason: str) -> None:
        with self._common.lock:
            if link.closed:
                return
            self._end_link(link, reason)
        with suppress(OSError):  # the front is gone, and this process goes with it
            self._closed(link.peer, link.epoch, reason)

    def _event(self) -> torch.cuda.Event | None:
        """Marks the work that was queued so far on the caller's GPU stream; None on a CPU, where it is done already."""
        if self._common.kv.device.type != "cuda":
            return None
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._common.kv.device))
        return event

    def _on_device(self, slots: torch.Tensor | Sequence[int]) -> torch.Tensor:
        return torch.as_tensor(slots, dtype=torch.int64).to(self._common.kv.device)


def _grant_of(incoming: Incoming) -> Grant:
    return Grant(incoming.ticket, incoming.attempt, incoming.record.landing.first)
