"""What a router remembers of recent requests, and where the time of one of them went."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from pdserve.client.events import FinishReason, Usage
from pdserve.client.stats import LatencyStats
from pdserve.core.trace import TraceSpan


class RequestState(StrEnum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """One request. `arrived_ns` is Unix time in nanoseconds by the router's clock; `ttft_ms` is None where no token
    came. `code` and `error` are those of one that failed. `usage` is as far as it is known."""

    request_id: str
    trace_id: str
    model: str
    state: RequestState
    arrived_ns: int
    duration_ms: float
    ttft_ms: float | None
    itl: LatencyStats
    usage: Usage
    workers: tuple[str, ...]
    finish_reason: FinishReason | None = None
    code: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class TraceSource:
    """A process that was asked for its part. `missing` says why it is not here; empty where it is.

    Its clock was `clock_offset_ns` ahead of the router's, give or take `clock_error_ns`; where that is more than the
    error, its spans were moved back by it.
    """

    service: str
    worker_id: str
    endpoint: str
    spans: int
    dropped: int
    missing: str
    clock_offset_ns: int = 0
    clock_error_ns: int = 0

    @property
    def moved(self) -> bool:
        """Whether its spans were moved."""
        return abs(self.clock_offset_ns) > self.clock_error_ns


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of one request, in no order; see `pdserve.core.trace.arrange`."""

    request: RequestSummary
    spans: tuple[TraceSpan, ...] = ()
    sources: tuple[TraceSource, ...] = field(default=())

    def with_spans(self, service: str, spans: Iterable[TraceSpan]) -> Trace:
        """With what another process knows of it: a gateway's own part, which no router can ask for."""
        more = tuple(replace(span, service=service) for span in spans)
        source = TraceSource(service, "", "", len(more), 0, "")
        return replace(self, spans=(*self.spans, *more), sources=(*self.sources, source))
