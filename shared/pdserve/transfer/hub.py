"""All links of one engine process, as its loop and its link control see them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from pdserve.core.errors import ConfigError, PdserveError
from pdserve.core.layout import KVLayout
from pdserve.transfer.common import Common, LinkSettings, Wire
from pdserve.transfer.link import Endings, Link
from pdserve.transfer.messages import (
    Announce,
    Commit,
    Committed,
    ControlMessage,
    Credit,
    Grant,
    StoreSet,
    TicketClosed,
    TransferEvent,
)
from pdserve.transfer.pages import KVPages
from pdserve.transfer.receives import Receives
from pdserve.transfer.ring import Ring, RingPool
from pdserve.transfer.sends import Sends
from pdserve.transfer.transport import LinkLost

__all__ = ["LinkHub", "LinkSettings"]


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
        self._links: dict[str, Link] = {}
        self._sends = Sends(self._common, self._links)
        self._receives = Receives(self._common, self._links)
        self._established, self._closed = established, closed
        self._ended: dict[str, int] = {}  # the epoch of each peer's last link
        self._leaving: list[tuple[float, Link]] = []
        self._rings: dict[torch.device, RingPool] = {}

    # Links; called from the thread that reads link control.

    def open(self, peer: str, epoch: int, initiator: bool, transport: str) -> None:
        """Make the data half of a link whose control half is up: then `established`, or `closed` with the reason."""
        common = self._common
        problem = ""
        with common.lock:
            if (old := self._links.get(peer)) is not None:
                self._end_link(old, "a newer link to this worker took its place")
            try:
                ring, give_back = self._lease(transport)
            except PdserveError as error:
                problem = str(error)
                self._ended[peer] = epoch
                self._fail(peer, problem)
            else:
                endings = Endings(self._up, self._broke, give_back)
                link = Link(common, peer, epoch, initiator, transport, ring, endings)
                self._links[peer] = link
                self._receives.on_link(link)
                link.start()
        if problem:
            self._closed(peer, epoch, problem)
        common.wire.flush()

    def on_control(self, peer: str, epoch: int, message: ControlMessage) -> None:
        """Take in a control message; one of a link that is gone is dropped."""
        with self._common.lock:
            link = self._links.get(peer)
            if link is None or link.epoch != epoch:
                return
            try:
                self._dispatch(link, message)
                problem = ""
            except LinkLost as error:
                problem = str(error)
        if problem:
            self._broke(link, problem)
        self._common.wire.flush()

    def close(self, peer: str, epoch: int, reason: str) -> None:
        """The control half is gone, or never came up: every attempt on the link fails at once."""
        with self._common.lock:
            link = self._links.get(peer)
            if link is not None and link.epoch == epoch:
                self._end_link(link, reason)
            elif link is None and self._ended.get(peer) != epoch:  # not the echo of an end that the hub announced
                self._ended[peer] = epoch
                self._fail(peer, reason)

    # The prefill side; called from the engine loop.

    def start_send(
        self, ticket: str, attempt: int, peer: str, slots: torch.Tensor | Sequence[int], num_tokens: int
    ) -> None:
        """Send `num_tokens` tokens' KV to `peer`, once it grants them and as they are computed.

        `slots` is each token's page slot. The pages must stay until SendCommitted, SendFailed or SendStopped. Where
        there is no link it is waited for. Raises IntegrityError for a ticket that is being sent already.
        """
        self._sends.start(ticket, attempt, peer, slots, num_tokens)

    def advance(self, tickets: Sequence[tuple[str, int]], layer: int) -> None:
        """Say how many tokens of each ticket have their KV of `layer` now (on a GPU: after the work queued so far).

        Called once a layer in the layer loop, so it only notes; senders are woken when a frame's worth has come
        together, and at the last layer. Tickets that are not being sent are skipped.
        """
        self._sends.advance(tickets, layer)

    def finish_send(self, ticket: str, first_token: int) -> None:
        """Everything is computed, and so is the first token: commit after the last frame; then comes SendCommitted."""
        self._sends.finish(ticket, first_token)

    def stop_send(self, ticket: str) -> None:
        """Stop sending, and tell the peer. SendStopped follows in any case, for unknown tickets too."""
        self._sends.stop(ticket)

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
        self._receives.grant(ticket, attempt, peer, slots, num_tokens, tokens_held)

    def revoke(self, ticket: str, reason: str) -> None:
        """Take the pages back, and tell the peer. Revoked follows in any case, for unknown tickets too."""
        self._receives.revoke(ticket, reason)

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
            for pool in self._rings.values():
                pool.check_integrity()

    def shutdown(self) -> None:
        """End all links and wait for their threads, up to their deadline."""
        common, reason = self._common, "this worker is shutting down"
        with common.lock:
            for link in list(self._links.values()):
                self._end_link(link, reason)
            waiting = [*common.outgoing.by_ticket.values(), *common.incoming.by_ticket.values()]
            for peer in {attempt.peer for attempt in waiting}:
                self._fail(peer, reason)
            leaving = list(self._leaving)
        for deadline, link in leaving:
            link.join(deadline)

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
                self._sends.on_grant(link.peer, message)
            case Committed(ticket, attempt):
                self._sends.on_committed(link.peer, ticket, attempt)
            case TicketClosed():
                if not self._receives.on_closed(link.peer, message):
                    self._sends.on_closed(link.peer, message)

    def _fail(self, peer: str, reason: str) -> None:
        self._sends.fail(peer, reason)
        self._receives.fail(peer, reason)

    def _end_link(self, link: Link, reason: str) -> None:
        """Fail what is on the link at once. Its threads come back later, and only then are its buffers free."""
        del self._links[link.peer]
        self._ended[link.peer] = link.epoch
        self._leaving = [(deadline, gone) for deadline, gone in self._leaving if gone.alive()]
        settings = self._common.settings
        self._leaving.append((time.monotonic() + settings.open_timeout + 2 * settings.frame_timeout, link))
        link.close(reason)
        self._fail(link.peer, reason)

    def _lease(self, transport: str) -> tuple[Ring | None, Callable[[], None]]:
        """A ring for a link's receiving direction, where this worker has one, and how to return it."""
        settings = self._common.settings
        if not settings.receives:
            return None, lambda: None
        device = torch.device("cpu") if transport == "gloo" else self._common.kv.device
        if device not in self._rings:
            unit = self._common.layout.layer_token_bytes
            self._rings[device] = RingPool(settings.ring_bytes, settings.frame_bytes, unit, device)
        pool = self._rings[device]
        ring = pool.lease()

        def give_back() -> None:
            with self._common.lock:
                pool.give_back(ring)

        return ring, give_back

    # Without it, from a link's threads.

    def _up(self, link: Link) -> None:
        self._established(link.peer, link.epoch)

    def _broke(self, link: Link, reason: str) -> None:
        with self._common.lock:
            if link.closed:
                return
            self._end_link(link, reason)
        with suppress(OSError):  # the front is gone, and this process goes with it
            self._closed(link.peer, link.epoch, reason)
