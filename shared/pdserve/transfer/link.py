"""One link: its store, its groups, its threads. Its life is the life of its control stream, told by `close`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
from torch._C._distributed_c10d import PrefixStore

from pdserve.core.errors import ConfigError, PdserveError
from pdserve.transfer.common import Common
from pdserve.transfer.connect import connector, warm_up
from pdserve.transfer.messages import ControlMessage
from pdserve.transfer.receiver import Receiver
from pdserve.transfer.ring import Ring
from pdserve.transfer.sender import Sender
from pdserve.transfer.store import MirrorStore
from pdserve.transfer.transport import Transport


@dataclass(frozen=True, slots=True)
class Endings:
    """What a link's threads ask and report, without the lock held: a ring to receive into, waited for; both groups are
    up; the link broke; its ring is unused."""

    lease: Callable[[Link], Ring]
    up: Callable[[Link], None]
    broke: Callable[[Link, str], None]
    quiet: Callable[[Ring], None]


class Link:
    """Both directions to one peer in one epoch. A thread makes the groups, then one thread a direction serves it."""

    def __init__(self, common: Common, peer: str, epoch: int, initiator: bool, transport: str, tell: Endings) -> None:
        self.peer, self.epoch, self.transport = peer, epoch, transport
        self.closed = False
        self.established = False
        self.used = common.clock()  # when an attempt last had part in it
        self.bytes_per_second = self.round_trip = 0.0  # as measured last; 0: not
        self.sender = Sender(common, self.post)
        self.receiver = Receiver(common, peer, self.post) if common.settings.receives else None
        self.store = MirrorStore(self._mirror, timedelta(seconds=common.settings.open_timeout))
        self._common = common
        self._rank = 0 if initiator else 1
        self._tell = tell
        self._ring: Ring | None = None
        self._transports: list[Transport] = []
        self._threads = [threading.Thread(target=self._open, name=f"kv-open-{peer}", daemon=True)]

    def start(self) -> None:
        """Begin to make the groups."""
        self._threads[0].start()

    def post(self, message: ControlMessage) -> None:
        """Queue a control message on the wire; with the lock held."""
        self._common.wire.post(self.peer, self.epoch, message)

    def close(self, reason: str) -> None:
        """With the lock held: make the threads end. They do so by themselves, within a frame's deadline."""
        self.closed = True
        self.sender.close()
        if self.receiver is not None:
            self.receiver.close()
        self.store.abort(reason)
        for transport in self._transports:
            transport.abort()

    def alive(self) -> int:
        """How many of its threads are not back yet."""
        return sum(thread.is_alive() for thread in self._threads)

    def join(self, deadline: float) -> None:
        """Wait for the threads of a closed link, up to `deadline` on the monotonic clock."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _mirror(self, message: ControlMessage) -> None:
        self.post(message)
        self._common.wire.flush()

    def note_probe(self, round_trip: float, samples: list[tuple[int, float]]) -> None:
        """Take in what a probe found."""
        self.round_trip = round_trip
        self.bytes_per_second = max((rate for _, rate in samples), default=0.0)

    def _open(self) -> None:
        self._settle_in()
        receives = False
        try:
            if self.receiver is not None:
                self._ring = self._tell.lease(self)
            made = self._connect()
            with self._common.lock:
                if not self.closed:
                    self._threads += [self._serve(transport, sends) for transport, sends in made]
                    for thread in self._threads[1:]:
                        thread.start()
                    receives = any(not sends for _, sends in made)
                    self.established = True
            if len(self._threads) > 1 or not made:
                self._tell.up(self)
        except Exception as error:
            self._tell.broke(self, describe(error))
        finally:
            if len(self._threads) == 1:
                for transport in self._transports:
                    transport.close()
            if not receives:
                self._quiet()

    def _connect(self) -> list[tuple[Transport, bool]]:
        """Make the groups that both ends want, the initiator's sending one first, and whether we send.

        One after the other, in the same order at both ends: making a communicator may wait for the peer.
        """
        settings = self._common.settings
        if settings.transport not in ("auto", self.transport):
            raise ConfigError(f"this worker links over {settings.transport}, the peer wants {self.transport}")
        connect = connector(self.transport, str(self._common.kv.device), settings.hostname, settings.interface)
        self.store.set(f"wants/{self._rank}", bytes([settings.sends, settings.receives]))
        their_sends, their_receives = self.store.get(f"wants/{1 - self._rank}")
        made = []
        for source in (0, 1):
            sends = source == self._rank
            if not (settings.sends and their_receives if sends else settings.receives and their_sends):
                continue
            store = PrefixStore(f"from/{source}", self.store)
            transport = connect(store, self._rank, timedelta(seconds=settings.frame_timeout))
            self._transports.append(transport)
            warm_up(transport, sends)
            made.append((transport, sends))
        return made

    def _serve(self, transport: Transport, sends: bool) -> threading.Thread:
        name = f"kv-{'send' if sends else 'recv'}-{self.peer}"
        return threading.Thread(target=partial(self._run, transport, sends), name=name, daemon=True)

    def _run(self, transport: Transport, sends: bool) -> None:
        self._settle_in()
        try:
            if sends:
                self.sender.run(transport)
            elif self.receiver is not None and self._ring is not None:
                self.receiver.run(transport, self._ring)
        except Exception as error:
            self._tell.broke(self, describe(error))
        finally:
            transport.close()
            if sends:
                self.sender.frames = []
            else:
                self._quiet()

    def _quiet(self) -> None:
        """Nothing is received into the ring any more."""
        ring, self._ring = self._ring, None
        if ring is not None:
            self._tell.quiet(ring)

    def _settle_in(self) -> None:
        """Keep a link's thread from spreading its copies over the engine's cores."""
        torch.set_num_threads(1)
        if self._common.kv.device.type == "cuda":
            torch.cuda.set_device(self._common.kv.device)


def describe(error: Exception) -> str:
    """One line for the reason of a link's end; of what is no error of ours, with its type."""
    return str(error) if isinstance(error, PdserveError) else f"{type(error).__name__}: {error}"
