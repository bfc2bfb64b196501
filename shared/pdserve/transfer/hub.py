"""All links of one engine process, as its loop and its link control see them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict

import torch

from pdserve.core.errors import ConfigError
from pdserve.core.layout import KVLayout
from pdserve.policy.transfer_plan import Wire as FrameWire
from pdserve.transfer.common import Common, LinkSettings, Wire
from pdserve.transfer.link import Endings, Link
from pdserve.transfer.messages import (
    Announce,
    Commit,
    Committed,
    ControlMessage,
    Credit,
    Grant,
    LinkReport,
    StoreSet,
    TicketClosed,
    TransferEvent,
    TransferReport,
)
from pdserve.transfer.pages import KVPages
from pdserve.transfer.probe import Done
from pdserve.transfer.receives import Receives
from pdserve.transfer.ring import Ring, Rings
from pdserve.transfer.sends import Sends
from pdserve.transfer.transport import LinkLost

__all__ = ["IDLE_CLOSED", "LinkHub", "LinkSettings"]

MakeLink = Callable[[Common, str, int, bool, str, Endings], Link]

IDLE_CLOSED = "idle, closed to make room for another link"


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
        measured: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        make_link: MakeLink = Link,
    ) -> None:
        unit = FrameWire.of(layout).bytes(0, 1)
        if min(settings.frame_bytes, settings.ring_bytes // 2) < unit:
            raise ConfigError(
                f"frame_bytes {settings.frame_bytes} or ring_bytes {settings.ring_bytes} is too small: "
                f"a token of a layer has {unit} bytes, and the ring holds two frames or more"
            )
        self._common = Common(kv, layout, settings, Wire(send_control), notify, clock)
        self._make_link = make_link
        self._links: dict[str, Link] = {}
        self._sends = Sends(self._common, self._links)
        self._receives = Receives(self._common, self._links)
        self._established, self._closed, self._measured = established, closed, measured
        self._ended: dict[str, int] = {}  # the epoch of each peer's last link
        self._leaving: list[tuple[float, Link]] = []
        self._rings = Rings(settings.ring_bytes, settings.frame_bytes, unit, self._common.lock)
        self._common.outgoing.left = self._common.incoming.left = self._rings.wake
        self._endings = Endings(self._lease, self._up, self._broke, self._rings.give_back)

    # Links; called from the thread that reads link control.

    def open(self, peer: str, epoch: int, initiator: bool, transport: str) -> None:
        """Make the data half of a link whose control half is up: then `established`, or `closed` with the reason."""
        common = self._common
        with common.lock:
            if (old := self._links.get(peer)) is not None:
                self._end_link(old, "a newer link to this worker took its place")
            link = self._links[peer] = self._make_link(common, peer, epoch, initiator, transport, self._endings)
            self._receives.on_link(link)
            link.start()
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

    def probe(self, peer: str, epoch: int, sizes: Sequence[int], bytes_per_size: int, done: Done) -> None:
        """Measure a link with frames that nobody keeps, beside what else it carries; sizes are capped by what it takes,
        none mean a range of them.

        `done` is called with the lock held and must not wait; at once, with no samples, where the link is gone, and not
        at all where it ends before.
        """
        with self._common.lock:
            link = self._links.get(peer)

            def note(round_trip: float, samples: list[tuple[int, float]]) -> None:
                if link is not None:
                    link.note_probe(round_trip, samples)
                done(round_trip, samples)

            if link is not None and link.epoch == epoch:
                link.sender.probe(sizes, bytes_per_size, note)
            else:
                done(0.0, [])

    # The sending side; called from the engine loop.

    def start_send(
        self,
        ticket: str,
        attempt: int,
        peer: str,
        slots: torch.Tensor | Sequence[int],
        num_tokens: int,
        tells_grant: bool = False,
        tells_landed: bool = False,
    ) -> None:
        """Send `num_tokens` tokens' KV to `peer`, once it grants them and as they are computed.

        `slots` is each token's page slot. The pages must stay until SendCommitted, SendFailed or SendStopped. Where
        there is no link it is waited for. `tells_grant`: the grant is told as Granted; `tells_landed`: SendLanded comes
        when all tokens have landed. Raises IntegrityError for a ticket that is being sent already.
        """
        self._sends.start(ticket, attempt, peer, slots, num_tokens, tells_grant, tells_landed)

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

    def refuse(self, ticket: str, attempt: int, peer: str, reason: str) -> None:
        """Tell `peer` that what it granted will not be sent."""
        self._sends.refuse(ticket, attempt, peer, reason)

    # The receiving side; called from the engine loop.

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

    def measured(self, peer: str) -> tuple[float, float]:
        """Bytes a second and seconds of a round trip to `peer`, as measured last; 0: not, or no link."""
        with self._common.lock:
            link = self._links.get(peer)
            return (link.bytes_per_second, link.round_trip) if link is not None else (0.0, 0.0)

    def stats(self) -> tuple[int, int]:
        """Bytes sent and received, all links together."""
        return self._common.counters.bytes_sent, self._common.counters.bytes_received

    def report(self) -> TransferReport:
        """All links as they are now, and what all of them did so far."""
        with self._common.lock:
            links = [_report(link) for link in self._links.values() if link.established]
            counters = asdict(self._common.counters)
        return TransferReport(links, **counters, threads_abandoned=self.abandoned)

    @property
    def leaving(self) -> bool:
        """Whether threads of closed links are still to come back."""
        with self._common.lock:
            return any(link.alive() for _, link in self._leaving)

    @property
    def abandoned(self) -> int:
        """How many threads of closed links are stuck past their deadline."""
        now = self._common.clock()
        with self._common.lock:
            return sum(link.alive() for deadline, link in self._leaving if deadline < now)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the shares of the receive ring add up."""
        with self._common.lock:
            self._rings.check_integrity()

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
        self._leaving.append((self._common.clock() + settings.open_timeout + 2 * settings.frame_timeout, link))
        link.close(reason)
        self._rings.wake()  # it may be waiting for a share
        self._fail(link.peer, reason)

    def _close_idle(self) -> Link | None:
        """End the link that was used least recently, of those that carry nothing now."""
        common = self._common
        busy = {attempt.peer for book in (common.outgoing, common.incoming) for attempt in book.by_ticket.values()}
        idle = [link for link in self._links.values() if link.established and link.peer not in busy]
        if not idle:
            return None
        link = min(idle, key=lambda link: link.used)
        self._end_link(link, IDLE_CLOSED)
        return link

    # Without it, from a link's threads.

    def _lease(self, link: Link) -> Ring:
        """A share of the receive ring; where none is free, that of a link that is idle."""
        settings = self._common.settings
        device = torch.device("cpu") if link.transport == "gloo" else self._common.kv.device
        closed: list[Link] = []

        def make_room() -> bool:
            if (idle := self._close_idle()) is not None:
                closed.append(idle)
            return idle is not None

        try:
            return self._rings.lease(device, settings.open_timeout, make_room, lambda: link.closed)
        finally:
            for idle in closed:
                self._closed(idle.peer, idle.epoch, IDLE_CLOSED)

    def _up(self, link: Link) -> None:
        self._established(link.peer, link.epoch)
        settings = self._common.settings
        if settings.probe_bytes and settings.sends:
            self.probe(link.peer, link.epoch, [settings.frame_bytes], settings.probe_bytes, lambda *_: self._measured())

    def _broke(self, link: Link, reason: str) -> None:
        with self._common.lock:
            if link.closed:
                return
            self._common.counters.links_lost += 1
            self._end_link(link, reason)
        with suppress(OSError):  # the front is gone, and this process goes with it
            self._closed(link.peer, link.epoch, reason)


def _report(link: Link) -> LinkReport:
    sender, receiver = link.sender, link.receiver
    return LinkReport(
        peer=link.peer,
        epoch=link.epoch,
        transport=link.transport,
        bytes_sent=sender.bytes_sent,
        bytes_received=receiver.bytes_received if receiver is not None else 0,
        bytes_in_flight=sum(size for _, size in sender.in_flight),
        frames_in_flight=len(sender.in_flight),
        credit=sender.credit,
        bytes_per_second=link.bytes_per_second,
        round_trip=link.round_trip,
    )
