"""The receiving direction of a link: one thread that receives what was announced and puts it in its pages."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from pdserve.core.errors import IntegrityError
from pdserve.policy.transfer_plan import Wire
from pdserve.transfer.attempts import Incoming
from pdserve.transfer.common import Common
from pdserve.transfer.messages import (
    Announce,
    Commit,
    Committed,
    ControlMessage,
    Credit,
    KvReady,
    TicketClosed,
)
from pdserve.transfer.pages import PageMover, checksum
from pdserve.transfer.probe import PROBE_TICKET
from pdserve.transfer.ring import Ring
from pdserve.transfer.transport import LinkLost, Transport, Work


class Receiver:
    """Methods other than `run` are called with the lock held and do not wait."""

    def __init__(self, common: Common, peer: str, post: Callable[[ControlMessage], None]) -> None:
        self.bytes_received = 0
        self._common = common
        self._peer = peer
        self._post = post
        self._wire = Wire.of(common.layout)
        self._changed = threading.Condition(common.lock)
        self._inbox: deque[Announce | Commit] = deque()
        self._announced = 0  # bytes whose credit was not returned yet
        self._closed = False

    def put(self, message: Announce | Commit) -> None:
        """Take in what the peer's sender said, in its order."""
        self._inbox.append(message)
        self._changed.notify()

    def close(self) -> None:
        self._closed = True
        self._changed.notify()

    def run(self, transport: Transport, ring: Ring) -> None:
        """The thread's body: returns once the link is closed, raises LinkLost when its data half fails.

        The next receive is posted before a frame is put in its pages; nothing is under way when this returns.
        """
        mover = PageMover(self._common.kv, self._common.layout)
        with self._common.lock:
            self._post(Credit(ring.capacity))
        self._common.wire.flush()
        posted: tuple[Announce, torch.Tensor, Work] | None = None
        while True:
            if posted is None:
                message = self._take()
                if message is None:
                    return
                if isinstance(message, Commit):
                    self._commit(message)
                    continue
                posted = self._receive(transport, ring, message)
            announce, frame, work = posted
            work.wait()
            following = self._take_announce()
            posted = self._receive(transport, ring, following) if following is not None else None
            self._land(announce, frame, mover)

    def _take(self) -> Announce | Commit | None:
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._closed)
            return None if self._closed else self._inbox.popleft()

    def _take_announce(self) -> Announce | None:
        with self._changed:
            if self._closed or not self._inbox or not isinstance(head := self._inbox[0], Announce):
                return None
            self._inbox.popleft()
            return head

    def _receive(self, transport: Transport, ring: Ring, announce: Announce) -> tuple[Announce, torch.Tensor, Work]:
        self._announced += announce.bytes
        if not 0 < announce.bytes <= ring.max_frame or self._announced > ring.capacity:
            raise LinkLost(f"the peer announced a frame of {announce.bytes} bytes, beyond its credit")
        frame = ring.slot(announce.bytes)
        return announce, frame, transport.recv(frame)

    def _land(self, announce: Announce, frame: torch.Tensor, mover: PageMover) -> None:
        """Put a received frame in its pages if its attempt is live, and give its credit back in any case."""
        common = self._common
        intact = announce.checksum is None or checksum(frame) == announce.checksum
        with common.lock:
            incoming = self._accept(announce, intact)
        if incoming is not None:
            layers = range(announce.layer_start, announce.layer_start + announce.layer_count)
            tokens = range(announce.token_start, announce.token_start + announce.token_count)
            try:
                mover.scatter(layers, incoming.slots, tokens, frame, incoming.after)
                with common.lock:  # also of an attempt that ended meanwhile: the next one builds on it
                    incoming.landing.accept(*_place(announce))
            finally:
                with common.lock:
                    common.incoming.leave(incoming)
        self._announced -= announce.bytes
        with common.lock:
            if announce.ticket != PROBE_TICKET:
                common.counters.bytes_received += announce.bytes
                common.counters.frames_received += 1
                self.bytes_received += announce.bytes
            self._post(Credit(announce.bytes))
        common.wire.flush()

    def _accept(self, announce: Announce, intact: bool) -> Incoming | None:
        """The attempt to put a frame in, marked busy; None where the frame is to be dropped."""
        incoming = self._common.incoming.live(announce.ticket, announce.attempt, self._peer)
        if incoming is None or self._closed:
            self._common.counters.stale_frames += announce.ticket != PROBE_TICKET
            return None
        size = announce.layer_count * self._wire.bytes(announce.token_start, announce.token_count)
        try:
            if not intact:
                raise IntegrityError(f"frame {announce.number} arrived damaged: its checksum is wrong")
            if announce.bytes != size:
                raise IntegrityError(f"frame {announce.number} has {announce.bytes} bytes, its pages {size}")
            incoming.landing.check(*_place(announce))
        except IntegrityError as error:
            self._fail(incoming, str(error))
            return None
        incoming.busy = True
        incoming.kv_bytes += announce.bytes
        return incoming

    def _commit(self, commit: Commit) -> None:
        """All frames of an attempt were announced before its commit, and so they have landed by now."""
        common = self._common
        with common.lock:
            incoming = common.incoming.live(commit.ticket, commit.attempt, self._peer)
            if incoming is None:
                self._post(TicketClosed(commit.ticket, commit.attempt, "nobody here waits for this attempt"))
            else:
                self._check(incoming, commit)
        common.wire.flush()

    def _check(self, incoming: Incoming, commit: Commit) -> None:
        landing = incoming.landing
        landing.commit(commit.frame_count)
        try:
            if not landing.ready:
                raise IntegrityError(f"{commit.frame_count} frames were committed, {landing.frames} landed")
        except IntegrityError as error:
            self._fail(incoming, str(error))
            return
        ready = KvReady(incoming.ticket, incoming.attempt, commit.first_token, incoming.kv_bytes)
        self._common.incoming.end(incoming, lambda: self._common.notify(ready))
        self._post(Committed(incoming.ticket, incoming.attempt))

    def _fail(self, incoming: Incoming, reason: str) -> None:
        self._common.fail_incoming(incoming, reason)
        self._post(TicketClosed(incoming.ticket, incoming.attempt, reason))


def _place(announce: Announce) -> tuple[int, int, int, int, int]:
    """A frame as Landing takes it."""
    return (
        announce.number,
        announce.layer_start,
        announce.layer_count,
        announce.token_start,
        announce.token_count,
    )
