"""When a request's tokens came: stamps as they come, stages and spans at the end."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.core.timeline import Stamps
from pdserve.telemetry import names
from pdserve.telemetry.tracing import record_span
from pdserve.v1 import inference_pb2


class TokenListener(Protocol):
    """Hears of each placement, and of each token that was timed. Times are seconds."""

    def queued(self, seconds: float) -> None: ...
    def first_token(self, seconds: float) -> None: ...
    def gap(self, seconds: float) -> None: ...


@dataclass(slots=True)
class Timeline(Stamps):
    """A request's stamps, and the gap before each token but the first. Tokens are timed here and nowhere else.

    Stamps are monotonic nanoseconds; `gaps` are seconds. A try that produced no token is overwritten by the next.
    """

    arrived: int = field(default_factory=time.monotonic_ns)
    # Monotonic to wall clock, for spans.
    offset: int = field(default_factory=lambda: time.time_ns() - time.monotonic_ns())
    gaps: array[float] = field(default_factory=lambda: array("d"))
    listener: TokenListener | None = None
    handover: bool = False  # the KV goes from one worker to another between the first token and the second
    sending: bool = False  # a message waits for its client to read; workers' events gather meanwhile
    _latest: int = 0
    _told: int = 0  # tokens that the listener has heard of
    _waits: list[float] = field(default_factory=list)  # for a worker, that it has not

    def dispatch(self, now: int, *, handover: bool = False) -> None:
        """A try starts. Once a token was shown, later tries are gaps between tokens and no stage of their own."""
        if not self.second:
            self.handover = handover
        if not self.first:
            self.dispatched, self.reserved, self.ready = now, 0, 0

    def queued(self, seconds: float) -> None:
        """It was placed after waiting so long for a worker."""
        self._waits.append(seconds)

    def token(self, now: int, count: int, took: float = 0.0) -> None:
        """Token number `count` (from 1) became known. `took`: seconds that computing it took, as far as was told."""
        # The second may be heard of before the first: no client can see it before.
        now = max(now, self._latest)
        if count == 1:
            self.first, self.computing = now, round(took * 1e9)
        else:
            if count == 2:
                self.second, self.stepping = now, round(took * 1e9)
            self.gaps.append((now - self._latest) / 1e9)
        self._latest = now

    def tell(self) -> None:
        """Let the listener hear of what is new to it: when that is on its way, since telling takes time."""
        told, self._told = self._told, self.tokens
        if self.listener is None:
            return
        while self._waits:
            self.listener.queued(self._waits.pop(0))
        if told == self._told:
            return
        if not told:
            self.listener.first_token((self.first - self.arrived) / 1e9)
        for gap in self.gaps[max(0, told - 1) :]:
            self.listener.gap(gap)

    @staticmethod
    def now() -> int:
        return time.monotonic_ns()

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token; None while there is none."""
        return (self.first - self.arrived) / 1e9 if self.first else None

    @property
    def open_gap(self) -> float:
        """Seconds since the latest token, while the workers owe the next one; 0 before the first, and while a client
        reads."""
        return 0.0 if self.sending or not self.first else max(0, time.monotonic_ns() - self._latest) / 1e9

    @property
    def latest(self) -> int:
        """When the latest token came, monotonic nanoseconds; 0: none did."""
        return self._latest

    @property
    def tokens(self) -> int:
        """How many there were so far."""
        return len(self.gaps) + bool(self.first)

    @property
    def waited(self) -> float:
        """Seconds since arrival."""
        return (time.monotonic_ns() - self.arrived) / 1e9

    def told(self) -> inference_pb2.Stages:
        """The stages as inference.proto defines them."""
        stages = self.stages()
        return inference_pb2.Stages(
            queue_ms=stages.queue / 1e6,
            reserve_ms=stages.reserve / 1e6,
            prefill_ms=stages.prefill / 1e6,
            transfer_exposed_ms=stages.transfer_exposed / 1e6,
            decode_wait_ms=stages.decode_wait / 1e6,
            first_step_ms=stages.first_step / 1e6,
        )

    def record(self, traceparent: str, end: int, *, complete: bool) -> None:
        """Spans below `traceparent` for the stages, one after the other, and for the rest; `end` is when all was over.

        A stage that the request did not get to the end of lasts until then. `complete`: it got all its tokens.
        """
        stages, at = self.stages(), self.arrived
        for name, length in (
            (names.SPAN_QUEUE, stages.queue),
            (names.SPAN_RESERVE, stages.reserve),
            (names.SPAN_PREFILL, stages.prefill),
            (names.SPAN_TRANSFER, stages.transfer_exposed),
            (names.SPAN_DECODE_WAIT, stages.decode_wait),
            (names.SPAN_FIRST_STEP, stages.first_step),
        ):
            if length:
                record_span(name, at + self.offset, at + length + self.offset, traceparent)
                at += length
        if self.second:
            record_span(names.SPAN_DECODE, at + self.offset, end + self.offset, traceparent)
        elif not self.first:
            name = names.SPAN_PREFILL if self.dispatched else names.SPAN_QUEUE
            record_span(name, at + self.offset, end + self.offset, traceparent)
        elif not complete:
            self._record_first_gap(traceparent, at, end)

    def _record_first_gap(self, traceparent: str, at: int, end: int) -> None:
        """The gap after the first token, at `at`, that no second one closed: its stages as far as they are known."""
        if self.handover and self.ready > at:
            record_span(names.SPAN_TRANSFER, at + self.offset, self.ready + self.offset, traceparent)
            at = self.ready
        name = names.SPAN_TRANSFER if self.handover and not self.ready else names.SPAN_DECODE_WAIT
        record_span(name, at + self.offset, end + self.offset, traceparent)
