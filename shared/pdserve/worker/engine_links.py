"""The links of an engine process: the hub, the thread that hands it control messages, and what the front is told."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from pdserve.engine.build import BuiltEngine
from pdserve.transfer.connect import require
from pdserve.transfer.hub import LinkHub, LinkSettings
from pdserve.transfer.messages import TransferEvent, TransferReport
from pdserve.transfer.probe import Done
from pdserve.worker.channel import Channel
from pdserve.worker.messages import (
    EngineSettings,
    LinkClosed,
    LinkControl,
    LinkEstablished,
    LinkMessage,
    LinkOpened,
    LinkProbe,
    LinkProbed,
    LinkStats,
)

# What a new link is measured with: some milliseconds on any fabric.
PROBE_BYTES = 16 << 20
PROBE_FRAMES = 128
DEFAULT_PROBE_BYTES = 32 << 20  # a size, where whoever asks names no amount
REPORT_PACE = 0.25  # seconds between reports of the links' state


class EngineLinks:
    """`notify` and `wake` are called from link threads and must not wait. Raises ConfigError for a transport that
    cannot run here: now, not when the first link opens."""

    def __init__(
        self,
        settings: EngineSettings,
        built: BuiltEngine,
        channel: Channel[LinkMessage, LinkMessage],
        notify: Callable[[TransferEvent], None],
        wake: Callable[[], None],
    ) -> None:
        require(settings.kv_transport, str(built.device))
        self._channel, self._wake = channel, wake
        self.hub = LinkHub(
            built.kv,
            built.layout,
            LinkSettings(
                frame_bytes=settings.frame_bytes,
                ring_bytes=settings.ring_bytes,
                frame_timeout=settings.frame_timeout,
                transport=settings.kv_transport,
                hostname=settings.kv_host,
                target_bytes=settings.target_bytes,
                checksum=settings.kv_checksum,
                probe_bytes=min(PROBE_BYTES, PROBE_FRAMES * settings.frame_bytes),
            ),
            send_control=lambda peer, epoch, message: channel.send(LinkControl(peer, epoch, message)),
            established=self._established,
            closed=lambda peer, epoch, reason: channel.send(LinkClosed(peer, epoch, reason)),
            notify=notify,
            measured=wake,
        )
        self._failure: Exception | None = None
        self._probes: deque[LinkProbed] = deque()
        self._reported = TransferReport()
        self._due = 0.0
        self._pending = False

    def start(self) -> None:
        """Take in link control from now on."""
        threading.Thread(target=self._serve, name="link-control", daemon=True).start()

    def raise_failure(self) -> None:
        """Raise what ended the thread: a worker that can link with nobody must not look healthy."""
        if self._failure is not None:
            raise self._failure

    @property
    def due(self) -> float | None:
        """When `tell` is to be called again though nothing happens, on the monotonic clock; None: not at all."""
        return self._due if self._pending else None

    def tell(self, complete: Callable[[TransferReport], TransferReport]) -> None:
        """Tell the front how the links are, at a pace that costs nothing, where it changed. `complete` adds what is
        counted beside them. Called by the loop whenever something happened."""
        while self._probes:
            self._channel.send(self._probes.popleft())
        now = time.monotonic()
        self._pending = True
        if now < self._due:
            return
        report = complete(self.hub.report())
        changed = report != self._reported
        self._pending = changed or self.hub.leaving or any(link.frames_in_flight for link in report.links)
        if changed:
            self._channel.send(LinkStats(report))
        self._reported, self._due = report, now + REPORT_PACE

    def _established(self, peer: str, epoch: int) -> None:
        self._channel.send(LinkEstablished(peer, epoch))
        self._wake()

    def _probed(self, peer: str, epoch: int) -> Done:
        """What is called, with the links' lock held, once a probe is through."""

        def note(round_trip: float, samples: list[tuple[int, float]]) -> None:
            self._probes.append(LinkProbed(peer, epoch, round_trip, samples))
            self._wake()

        return note

    def _serve(self) -> None:
        """Hand link control to the hub at once, so that a frame never waits for a step."""
        try:
            while (message := self._channel.receive()) is not None:
                self._take(message)
        except (BrokenPipeError, ConnectionResetError):
            return  # the front is gone; the loop sees it too
        except Exception as error:
            self._failure = error
            self._wake()

    def _take(self, message: LinkMessage) -> None:
        match message:
            case LinkOpened(peer, epoch, initiator, transport):
                self.hub.open(peer, epoch, initiator, transport)
            case LinkControl(peer, epoch, control):
                self.hub.on_control(peer, epoch, control)
            case LinkClosed(peer, epoch, reason):
                self.hub.close(peer, epoch, reason)
            case LinkProbe(peer, epoch, sizes, amount):
                self.hub.probe(peer, epoch, sizes, amount or DEFAULT_PROBE_BYTES, self._probed(peer, epoch))
            case LinkEstablished() | LinkProbed() | LinkStats():
                pass  # only ever sent the other way
