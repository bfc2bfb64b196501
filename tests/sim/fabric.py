"""The data half of KV links without threads: the real hub, books, sender and receiver, moved on by events.

Both ends find each other over the link's store, which goes over the control stream as ever. Then frames travel in
order, one at a time, each with a latency of its own.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pdserve.core.errors import PdserveError
from pdserve.transfer.attempts import Incoming
from pdserve.transfer.common import Common
from pdserve.transfer.link import Endings, Link
from pdserve.transfer.messages import Announce, Commit, Credit, StoreSet
from pdserve.transfer.pages import PageMover
from tests.sim.network import Pipe

if TYPE_CHECKING:
    from tests.sim.engine import SimEngine

LINK_RATE, ROUND_TRIP = 1e5, 0.002  # as measured, so that pulls are worth it now and then


class Received:
    """A transport whose next frame is there already."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()

    def recv(self, tensor: torch.Tensor) -> Any:
        tensor.numpy()[:] = np.frombuffer(self.frames.popleft(), dtype=np.uint8)


class SimLink(Link):
    """One end of a link. `pump` does what can be done now, in place of its threads; it is called without the lock."""

    def __init__(
        self, engine: SimEngine, common: Common, peer: str, epoch: int, initiator: bool, transport: str, tell: Endings
    ) -> None:
        super().__init__(common, peer, epoch, initiator, transport, tell)
        self.engine = engine
        self.bytes_per_second, self.round_trip = LINK_RATE, ROUND_TRIP
        self.name = next(engine.world.link_names)
        self._mover = PageMover(common.kv, common.layout)
        self._arrived = Received()
        self._buffer = torch.empty(common.settings.frame_bytes, dtype=torch.uint8)
        self._data: Pipe | None = None
        self._other: SimLink | None = None
        self._sending = self._copying = False

    def start(self) -> None:
        """With the lock held: tell the other end our name."""
        self.engine.world.links[self.name] = self
        self._tell_name()

    def _tell_name(self) -> None:
        value = str(self.name).encode()
        self.store.put(f"end/{self._rank}", value)
        self.post(StoreSet(f"end/{self._rank}", value))

    def close(self, reason: str) -> None:
        super().close(reason)
        self.engine.world.links.pop(self.name, None)
        if not self._copying:
            self.engine.later(self._quiet)

    def pump(self) -> None:
        try:
            if not self.closed and not self.established:
                self._meet()
            if not self.closed and self.established:
                self._receive()
                self._send()
        except PdserveError as error:
            self._tell.broke(self, str(error))

    def breaks(self, reason: str) -> None:
        """The data half fails."""
        self._tell.broke(self, reason)

    def _meet(self) -> None:
        key = f"end/{1 - self._rank}"
        if not self.store.check([key]):
            return
        self._other = self.engine.world.links.get(int(self.store.get(key)))
        if self._other is None:
            self.breaks("the peer is gone")
            return
        self._ring = self._tell.lease(self)
        world = self.engine.world
        self._data = Pipe(world.network, self.engine.process, self._other.engine.process)
        with self._common.lock:
            self.established = True
            self.post(Credit(self._ring.capacity))
        self._common.wire.flush()
        self._tell.up(self)

    def _send(self) -> None:
        """The next frame, where none is on its way out."""
        if self._sending or self._data is None or self._other is None:
            return
        if size := self.sender._prepare(self._buffer, self._mover, wait=False):
            self._sending = True
            self._data.send(self._other.land, self._buffer[:size].numpy().tobytes())
            self.engine.later(self._sent, self.engine.world.network.latency())

    def _sent(self) -> None:
        self._sending = False
        self.pump()

    def land(self, frame: bytes) -> None:
        """A frame has come."""
        if not self.closed:
            self._arrived.frames.append(frame)
            self.pump()

    def _receive(self) -> None:
        receiver, ring = self.receiver, self._ring
        assert receiver is not None and ring is not None
        while not (self.closed or self._copying) and receiver._inbox:
            head = receiver._inbox[0]
            if isinstance(head, Commit):
                receiver._inbox.popleft()
                receiver._commit(head)
            elif isinstance(head, Announce) and self._arrived.frames:
                receiver._inbox.popleft()
                announce, frame, _ = receiver._receive(self._arrived, ring, head)  # type: ignore[arg-type]
                self._copy(announce, frame)
            else:
                return

    def _copy(self, announce: Announce, frame: torch.Tensor) -> None:
        """Put a frame in its pages, which takes a while: until then its attempt is busy."""
        common = self._common
        with common.lock:
            incoming = common.incoming.live(announce.ticket, announce.attempt, self.peer)
            if incoming is not None:
                incoming.busy = self._copying = True
        if incoming is None:
            self._land(announce, frame)
        else:
            seconds = self.engine.world.network.latency()
            self.engine.later(partial(self._copied, announce, frame, incoming), seconds)

    def _copied(self, announce: Announce, frame: torch.Tensor, incoming: Incoming) -> None:
        self._copying = False
        if not incoming.over:
            incoming.busy = False  # until it is really let in, below
            self._land(announce, frame)
        else:  # it ended in the midst: what was begun is written all the same, and only then it lets go
            layers = range(announce.layer_start, announce.layer_start + announce.layer_count)
            tokens = range(announce.token_start, announce.token_start + announce.token_count)
            self._mover.scatter(layers, incoming.slots, tokens, frame, None)
            with self._common.lock:
                incoming.landing.accept(announce.number, layers.start, len(layers), tokens.start, len(tokens))
                self._common.incoming.leave(incoming)
        if self.closed:  # the frame was read from the ring up to here, which is another link's from now on
            self._quiet()
        self.pump()

    def _land(self, announce: Announce, frame: torch.Tensor) -> None:
        assert self.receiver is not None
        self.receiver._land(announce, frame, self._mover)
