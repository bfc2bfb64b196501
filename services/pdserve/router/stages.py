"""Where the time of a request went: stamps as they come, sums and spans at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pdserve.telemetry import names
from pdserve.telemetry.tracing import record_span
from pdserve.v1 import inference_pb2


@dataclass(slots=True)
class Timeline:
    """Stamps in monotonic nanoseconds; 0: not reached. A try that produced no token is overwritten by the next."""

    arrived: int = field(default_factory=time.monotonic_ns)
    # Monotonic to wall clock, for spans.
    offset: int = field(default_factory=lambda: time.time_ns() - time.monotonic_ns())
    dispatched: int = 0
    reserved: int = 0
    first: int = 0
    ready: int = 0
    second: int = 0

    def dispatch(self, now: int) -> None:
        """A try starts. Once a token was shown, later tries are gaps between tokens and no stage of their own."""
        if not self.first:
            self.dispatched, self.reserved, self.ready = now, 0, 0

    def token(self, now: int, count: int) -> None:
        """Token number `count` (from 1) became known."""
        if count == 1:
            self.first = now
        elif count == 2:
            self.second = now

    @staticmethod
    def now() -> int:
        return time.monotonic_ns()

    def stages(self) -> inference_pb2.Stages:
        """As inference.proto defines them; what was not reached is 0."""
        complete = max(self.first, self.ready) if self.ready else self.first
        return inference_pb2.Stages(
            queue_ms=_ms(self.arrived, self.dispatched),
            reserve_ms=_ms(self.dispatched, self.reserved),
            prefill_ms=_ms(self.dispatched, self.first),
            transfer_exposed_ms=_ms(self.first, min(complete, self.second or complete)),
            decode_wait_ms=_ms(min(complete, self.second), self.second),
        )

    def record(self, traceparent: str, end: int) -> None:
        """Spans for the stages, below `traceparent`; `end` is when the answer was complete."""
        complete = max(self.first, self.ready) if self.ready else self.first
        for name, start, stop in (
            (names.SPAN_QUEUE, self.arrived, self.dispatched),
            (names.SPAN_RESERVE, self.dispatched, self.reserved),
            (names.SPAN_PREFILL, self.dispatched, self.first),
            (names.SPAN_TRANSFER, self.first, complete if self.ready else 0),
            (names.SPAN_DECODE_WAIT, complete, self.second),
            (names.SPAN_DECODE, self.second, end if self.second else 0),
        ):
            if start and stop >= start:
                record_span(name, start + self.offset, stop + self.offset, traceparent)


def _ms(start: int, end: int) -> float:
    return max(0, end - start) / 1e6 if start and end else 0.0
