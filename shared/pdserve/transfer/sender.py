"""The sending direction of a link: one thread that chooses, gathers, announces and sends frames, in one order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from pdserve.policy.transfer_plan import DeficitRoundRobin, Frame, Wire, next_frame
from pdserve.transfer.attempts import Outgoing
from pdserve.transfer.common import Common
from pdserve.transfer.messages import Announce, Commit, ControlMessage, SendLanded
from pdserve.transfer.pages import PageMover, checksum
from pdserve.transfer.probe import PROBE_TICKET, Done, Probe, default_sizes
from pdserve.transfer.transport import Transport, Work

# Frames that may be gathered and announced beside the one under way: their announcements, which take a way of their
# own through both fronts, are there before them.
AHEAD = 2


class Sender:
    """Methods other than `run` are called with the lock held and do not wait."""

    def __init__(self, common: Common, post: Callable[[ControlMessage], None]) -> None:
        self.bytes_sent = 0
        self.credit = 0
        self.in_flight: deque[tuple[Outgoing | Probe, int]] = deque()  # whose announced frames are, oldest first
        self.frames: list[torch.Tensor] = []  # a transport may read them until it is closed
        self._common = common
        self._post = post
        self._changed = threading.Condition(common.lock)
        self._turns = DeficitRoundRobin(common.settings.frame_bytes)
        self._wire = Wire.of(common.layout)
        self._max_frame = 0  # unknown until the first credit
        self._share = 0  # of the credit, for one ticket while others wait
        self._probe: Probe | None = None
        self._probes: deque[tuple[Sequence[int], int, Done]] = deque()  # to come, until credit came or one is through
        self._closed = False

    def wake(self) -> None:
        """Look again: there is more to send."""
        self._changed.notify()

    def close(self) -> None:
        self._closed = True
        self._changed.notify()

    def add_credit(self, size: int) -> None:
        """The oldest frame in flight landed, or was dropped, and the peer has room for `size` more bytes.

        Its first word is all its room, of which a frame may fill half.
        """
        self.credit += size
        if not self._max_frame:
            self._max_frame = min(self._common.settings.frame_bytes, size // 2)
            self._share = max(self._max_frame, size // 2)
            self._next_probe()
        elif self.in_flight:
            owner, landed = self.in_flight.popleft()
            if isinstance(owner, Probe):
                owner.landed(self._common.clock())
                if owner is self._probe and owner.over:
                    self._probe = None
                    self._turns.remove(PROBE_TICKET)
                    self._next_probe()
            else:
                owner.in_flight -= landed
                self.settle(owner)
        self._changed.notify()

    def probe(self, sizes: Sequence[int], bytes_per_size: int, done: Done) -> None:
        """Measure the link, once credit came and other probes are through; `done` is called with the lock held, unless
        the link ends before."""
        self._probes.append((sizes, bytes_per_size, done))
        self._next_probe()

    def _next_probe(self) -> None:
        if self._probe is not None or not self._max_frame or not self._probes:
            return
        sizes, bytes_per_size, done = self._probes.popleft()
        wanted = [min(size, self._max_frame) for size in sizes or default_sizes(self._max_frame)]
        self._probe = Probe(sorted(set(wanted)), bytes_per_size, done, self._common.clock())
        self._turns.add(PROBE_TICKET)
        self._changed.notify()

    def admit(self, out: Outgoing) -> None:
        """Let a granted attempt take part."""
        self._turns.add(out.ticket)
        self.settle(out)
        self._changed.notify()

    def drop(self, ticket: str) -> None:
        self._turns.remove(ticket)

    def settle(self, out: Outgoing) -> None:
        """Commit an attempt if all its frames were announced and its first token is known; tell that they have landed
        where that is to be told."""
        if out.over or not out.granted or min(out.sent) != out.end:
            return
        if out.tells_landed and not out.in_flight:
            out.tells_landed = False
            self._common.notify(SendLanded(out.ticket, out.kv_bytes))
        if not out.committed and out.first_token is not None:
            out.committed = True
            self._turns.remove(out.ticket)
            self._post(Commit(out.ticket, out.attempt, out.frames, out.first_token))

    def run(self, transport: Transport) -> None:
        """The thread's body: returns once the link is closed, raises LinkLost when its data half fails.

        While one frame is under way the next ones are gathered and announced, so that their receives can be posted in
        time.
        """
        size = self._common.settings.frame_bytes
        self.frames = [torch.empty(size, dtype=torch.uint8, device=transport.device) for _ in range(AHEAD + 1)]
        free = list(self.frames)
        mover = PageMover(self._common.kv, self._common.layout)
        ready: deque[tuple[torch.Tensor, int]] = deque()
        under_way: tuple[Work, torch.Tensor] | None = None
        while True:
            bytes_ready = self._prepare(free[-1], mover, wait=under_way is None and not ready) if free else 0
            if self._closed:
                return
            if bytes_ready:
                ready.append((free.pop(), bytes_ready))
            if under_way is not None and not (bytes_ready and free):
                work, buffer = under_way
                work.wait()
                free.append(buffer)
                under_way = None
            if under_way is None and ready:
                buffer, count = ready.popleft()
                under_way = transport.send(buffer[:count]), buffer

    def _prepare(self, buffer: torch.Tensor, mover: PageMover, wait: bool) -> int:
        """Gather the next frame into `buffer` and announce it; its bytes. 0: there is none, or the link is closed."""
        common = self._common
        while True:
            with self._changed:
                while (choice := self._choose(ahead=not wait)) is None:
                    if self._closed or not wait:
                        return 0
                    self._changed.wait()
                if isinstance(choice, int):
                    self._announce_probe(choice)
                    out = None
                else:
                    out, frame = choice
                    out.busy = True
                    layers = range(frame.layer_start, frame.layer_start + frame.layer_count)
                    events = {event for event in _events(out, frame) if event is not None}
            if out is None:
                common.wire.flush()
                return choice if isinstance(choice, int) else 0
            tokens = range(frame.token_start, frame.token_start + frame.token_count)
            try:
                bound = mover.gather(layers, out.slots, tokens, buffer[: frame.bytes], events)
                check = checksum(buffer[: frame.bytes]) if common.settings.checksum else None
            finally:
                with common.lock:
                    common.outgoing.leave(out)
            with common.lock:
                announced = not (out.over or self._closed)
                if announced:
                    common.counters.error_bound = max(common.counters.error_bound, bound)
                    self._announce(out, frame, check)
            common.wire.flush()
            if announced:
                return frame.bytes

    def _choose(self, ahead: bool) -> tuple[Outgoing, Frame] | int | None:
        """A ticket's next frame, or the size of a probe's. `ahead`: only what is computed already, on a GPU too, since
        the frame under way must not wait for that."""
        if self._closed or not self._max_frame or self.credit < self._max_frame:
            return None
        settings, chosen = self._common.settings, dict[str, tuple[Outgoing, Frame]]()

        def size_of(ticket: str) -> int:
            if ticket == PROBE_TICKET:
                return self._probe.next_size() if self._probe is not None else 0
            out = self._common.outgoing.get(ticket)
            if out is None or out.over or not out.granted:
                return 0
            frame = next_frame(
                out.computed,
                out.sent,
                wire=self._wire,
                max_bytes=self._max_frame,
                target_bytes=settings.target_bytes,
                flush=out.first_token is not None,
            )
            if frame is None or (out.in_flight and len(self._turns) > 1 and out.in_flight + frame.bytes > self._share):
                return 0
            if ahead and not all(map(_completed, _events(out, frame))):
                return 0
            chosen[ticket] = (out, frame)
            return frame.bytes

        ticket = self._turns.choose(size_of)
        if ticket is None:
            return None
        return size_of(ticket) if ticket == PROBE_TICKET else chosen[ticket]

    def _announce(self, out: Outgoing, frame: Frame, check: int | None) -> None:
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
                check,
            )
        )
        for layer in range(frame.layer_start, frame.layer_start + frame.layer_count):
            out.sent[layer] = frame.token_start + frame.token_count
        out.began = out.began or self._common.clock()
        out.frames += 1
        out.kv_bytes += frame.bytes
        out.in_flight += frame.bytes
        self._count(out, frame.bytes)
        self._common.counters.bytes_sent += frame.bytes
        self._common.counters.frames_sent += 1
        self.bytes_sent += frame.bytes
        self.settle(out)

    def _announce_probe(self, size: int) -> None:
        assert self._probe is not None
        self._post(Announce(PROBE_TICKET, 0, 0, 0, 0, 0, 0, size))
        self._probe.sent(self._common.clock())
        self._count(self._probe, size)

    def _count(self, owner: Outgoing | Probe, size: int) -> None:
        self.in_flight.append((owner, size))
        self.credit -= size


def _events(out: Outgoing, frame: Frame) -> Sequence[torch.cuda.Event | None]:
    return out.events[frame.layer_start : frame.layer_start + frame.layer_count]


def _completed(event: torch.cuda.Event | None) -> bool:
    return event is None or bool(event.query())  # type: ignore[no-untyped-call]
