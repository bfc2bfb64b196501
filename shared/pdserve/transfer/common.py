"""What all links of one engine process share."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.core.layout import KVLayout
from pdserve.transfer.attempts import Book, Incoming, Outgoing
from pdserve.transfer.messages import ControlMessage, ReceiveFailed, TransferEvent
from pdserve.transfer.pages import KVPages


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Sizes in bytes, times in seconds.

    `transport` is "gloo", "nccl" or "auto": what a link may use. `hostname` or `interface`: where Gloo listens.
    `sends` and `receives` say which directions this worker needs; a link has those that both ends need. `checksum`:
    frames carry a CRC-32. `probe_bytes`: what a new link is measured with, before and beside its first frames; 0: not.
    """

    frame_bytes: int
    ring_bytes: int
    frame_timeout: float = 2.0
    transport: str = "auto"
    hostname: str = "127.0.0.1"
    interface: str = ""
    target_bytes: int = 256 << 10
    open_timeout: float = 5.0
    sends: bool = True
    receives: bool = True
    checksum: bool = False
    probe_bytes: int = 0


class Wire:
    """Control messages on their way out, in the order in which they were posted.

    They are posted with the lock held, so that their order is the order of what they tell, and sent without it.
    """

    def __init__(self, send: Callable[[str, int, ControlMessage], None]) -> None:
        self._send = send
        self._queue: deque[tuple[str, int, ControlMessage]] = deque()
        self._sending = threading.Lock()

    def post(self, peer: str, epoch: int, message: ControlMessage) -> None:
        self._queue.append((peer, epoch, message))

    def flush(self) -> None:
        """Send all that was posted. Not to be called with the books' lock held."""
        while self._queue:
            with self._sending:
                if self._queue:
                    self._send(*self._queue.popleft())


@dataclass(slots=True)
class Counters:
    """What all links of the process did, those that are gone included; fields as in messages.TransferReport."""

    bytes_sent: int = 0
    bytes_received: int = 0
    frames_sent: int = 0
    frames_received: int = 0
    transfers: int = 0
    transfer_seconds: float = 0.0
    exposed_seconds: float = 0.0
    bytes_produced: int = 0
    send_aborts: int = 0
    receive_aborts: int = 0
    stale_frames: int = 0
    links_lost: int = 0
    error_bound: float = 0.0


@dataclass(slots=True)
class Common:
    """`notify` is called with the lock held, so that events come in the order in which things happened. `clock` is a
    steady one, in seconds."""

    kv: KVPages
    layout: KVLayout
    settings: LinkSettings
    wire: Wire
    notify: Callable[[TransferEvent], None]
    clock: Callable[[], float] = time.monotonic
    lock: threading.Lock = field(default_factory=threading.Lock)
    outgoing: Book[Outgoing] = field(default_factory=Book)
    incoming: Book[Incoming] = field(default_factory=Book)
    counters: Counters = field(default_factory=Counters)

    def fail_incoming(self, incoming: Incoming, reason: str) -> None:
        """End an attempt to receive, with the lock held; what has landed is told once its pages are quiet."""
        self.counters.receive_aborts += 1

        def tell() -> None:
            self.notify(ReceiveFailed(incoming.ticket, incoming.attempt, reason, incoming.landing.whole))

        self.incoming.end(incoming, tell)
