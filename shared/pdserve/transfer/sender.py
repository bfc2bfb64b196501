"""The sending direction of a link: one thread that chooses, gathers, announces and sends frames, in one order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import cycle

import torch

from pdserve.policy.transfer_plan import DeficitRoundRobin, Frame, next_frame
from pdserve.transfer.attempts import Outgoing
from pdserve.transfer.common import Common
from pdserve.transfer.messages import Announce, Commit, ControlMessage
from pdserve.transfer.pages import PageMover
from pdserve.transfer.transport import Transport, Work


class Sender:
    """Methods other than `run` are called with the lock held and do not wait."""

    def __init__(self, common: Common, post: Callable[[ControlMessage], None]) -> None:
        self._common = common
        self._post = post
        self._changed = threading.Condition(common.lock)
        self._turns = DeficitRoundRobin(common.settings.frame_bytes)
        self._max_frame = 0  # unknown until the first credit
        self._credit = 0
        self._closed = False

    def wake(self) -> None:
        """Look again: there is more to send."""
        self._changed.notify()

    def close(self) -> None:
        self._closed = True
        self._changed.notify()

    def add_credit(self, size: int) -> None:
        """The peer has room for `size` more bytes. Its first word is all its room, of which a frame may fill half."""
        self._max_frame = self._max_frame or min(self._common.settings.frame_bytes, size // 2)
        self._credit += size
        self._changed.notify()

    def admit(self, out: Outgoing) -> None:
        """Let a granted attempt take part."""
        self._turns.add(out.ticket)
        self.settle(out)
        self._changed.notify()

    def drop(self, ticket: str) -> None:
        self._turns.remove(ticket)

    def settle(self, out: Outgoing) -> None:
        """Commit an attempt if all its frames were announced and its first token is known."""
        if out.granted and not out.committed and out.first_token is not None and min(out.sent) == out.end:
            out.committed = True
            self._turns.remove(out.ticket)
            self._post(Commit(out.ticket, out.attempt, out.frames, out.first_token))

    def run(self, transport: Transport) -> None:
        """The thread's body: returns once the link is closed, raises LinkLost when its data half fails.

        While one frame is under way the next is gathered and announced, so that its receive can be posted in time.
        """
        size = self._common.settings.frame_bytes
        buffers = [torch.empty(size, dtype=torch.uint8, device=transport.device) for _ in range(2)]
        mover = PageMover(self._common.kv, self._common.layout)
        under_way: Work | None = None
        for buffer in cycle(buffers):
            frame = self._prepare(buffer, mover, wait=under_way is None)
            if under_way is not None:
                under_way.wait()
            if self._closed:
                return
            under_way = transport.send(frame) if frame is not None else None

    def _prepare(self, buffer: torch.Tensor, mover: PageMover, wait: bool) -> torch.Tensor | None:
        """Gather the next frame into `buffer` and announce it. None: there is none, or the link is closed."""
        common = self._common
        while True:
            with self._changed:
                while (choice := self._choose()) is None:
                    if self._closed or not wait:
                        return None
                    self._changed.wait()
                out, frame = choice
                out.busy = True
                layers = range(frame.layer_start, frame.layer_start + frame.layer_count)
                events = {event for event in out.events[layers.start : layers.stop] if event is not None}
            slots = out.slots[frame.token_start : frame.token_start + frame.token_count]
            try:
                mover.gather(layers, slots, buffer[: frame.bytes], events)
            finally:
                with common.lock:
                    common.outgoing.leave(out)
            with common.lock:
                announced = not (out.over or self._closed)
                if announced:
                    self._announce(out, frame)
            common.wire.flush()
            if announced:
                return buffer[: frame.bytes]

    def _choose(self) -> tuple[Outgoing, Frame] | None:
        if self._closed or not self._max_frame or self._credit < self._max_frame:
            return None
        settings, chosen = self._common.settings, dict[str, tuple[Outgoing, Frame]]()

        def size_of(ticket: str) -> int:
            out = self._common.outgoing.get(ticket)
            if out is None or out.over or not out.granted:
                return 0
            frame = next_frame(
                out.computed,
                out.sent,
                layer_token_bytes=self._common.layout.layer_token_bytes,
                max_bytes=self._max_frame,
                target_bytes=settings.target_bytes,
                flush=out.first_token is not None,
            )
            if frame is None:
                return 0
            chosen[ticket] = (out, frame)
            return frame.bytes

        ticket = self._turns.choose(size_of)
        return chosen[ticket] if ticket is not None else None

    def _announce(self, out: Outgoing, frame: Frame) -> None:
        """From here on the frame will be sent, whatever becomes of its ticket."""
        self._post(
            Announce(
                out.ticket,
                out.attempt,
                out.frames,
                frame.layer_start,
                frame.layer_count,
                frame.token_start,
                frame.token_count,
                frame.bytes,
            )
        )
        for layer in range(frame.layer_start, frame.layer_start + frame.layer_count):
            out.sent[layer] = frame.token_start + frame.token_count
        out.frames += 1
        out.kv_bytes += frame.bytes
        self._credit -= frame.bytes
        self._common.bytes_sent += frame.bytes
        self.settle(out)
