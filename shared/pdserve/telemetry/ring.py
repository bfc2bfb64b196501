"""The spans of a process's most recent traces, in memory, so that a trace can be looked at where nothing collects them.

Recording is on by default, so it must cost next to nothing. OpenTelemetry's SDK takes some 60 us a span, ten times what
is kept here takes: it is used only where spans are exported too (SpanRing is one of its processors then).
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue as AnyAttribute

from pdserve.core.trace import AttributeValue, SpanLink, TraceSpan
from pdserve.telemetry import names

MAX_SPANS = 256  # of one trace; a prompt of 100,000 tokens has about fifty chunks
MAX_BYTES = 32 << 20
MAX_ERROR = 300  # characters
# A span without its attributes, and one attribute without its text, as they weigh in memory (measured, rounded up).
_SPAN_BYTES, _ATTRIBUTE_BYTES = 600, 100

Attributes = Mapping[str, AnyAttribute]


@dataclass(slots=True)
class Kept:
    """A span as it is kept: raw, because few are ever looked at."""

    name: str
    span_id: int
    parent_id: int
    start_ns: int
    end_ns: int
    attributes: Attributes
    failed: bool = False
    error: str = ""
    links: tuple[SpanLink, ...] = ()

    def weight(self) -> int:
        """About how many bytes it takes."""
        size = _SPAN_BYTES + len(self.error) + _ATTRIBUTE_BYTES * len(self.attributes)
        for value in self.attributes.values():
            if isinstance(value, str):
                size += len(value)
        return size

    def value(self, service: str) -> TraceSpan:
        kind = str(self.attributes.get(names.ERROR_TYPE, "")) if self.failed else ""
        return TraceSpan(
            service=service,
            worker_id="",
            name=self.name,
            span_id=f"{self.span_id:016x}",
            parent_span_id=f"{self.parent_id:016x}" if self.parent_id else "",
            start_ns=self.start_ns,
            end_ns=self.end_ns,
            attributes={key: _plain(value) for key, value in self.attributes.items()},
            failed=self.failed,
            error=self.error or kind,
            links=self.links,
        )


@dataclass(slots=True)
class _Trace:
    spans: list[Kept] = field(default_factory=list)
    bytes: int = 0
    dropped: int = 0


class SpanRing(SpanProcessor):
    """Keeps spans as they end, bounded in traces, in spans of each and in bytes: the oldest traces go first, whole.

    Not for several threads: services trace from their event loop.
    """

    def __init__(self, service: str, traces: int, max_spans: int = MAX_SPANS, max_bytes: int = MAX_BYTES) -> None:
        """`service` is whose spans they are."""
        self.service = service
        self.bytes = 0
        self._limits = traces, max_spans, max_bytes
        self._traces: OrderedDict[int, _Trace] = OrderedDict()

    def __len__(self) -> int:
        """How many traces there are."""
        return len(self._traces)

    def add(self, trace_id: int, span: Kept) -> None:
        """Keep a span that is over."""
        trace = self._traces.get(trace_id)
        if trace is None:
            trace = self._traces[trace_id] = _Trace()
        traces, max_spans, max_bytes = self._limits
        if len(trace.spans) >= max_spans:
            trace.dropped += 1
            return
        size = span.weight()
        trace.spans.append(span)
        trace.bytes += size
        self.bytes += size
        while len(self._traces) > traces or self.bytes > max_bytes:
            self.bytes -= self._traces.popitem(last=False)[1].bytes

    def spans(self, trace_id: str) -> tuple[list[TraceSpan], int]:
        """The spans of a trace, by its id in hex, and how many there was no room for. Nothing for an unknown one."""
        try:
            trace = self._traces.get(int(trace_id, 16))
        except ValueError:
            trace = None
        return ([kept.value(self.service) for kept in trace.spans], trace.dropped) if trace else ([], 0)

    def on_end(self, span: ReadableSpan) -> None:
        """The SDK ended a span."""
        assert span.context is not None
        kept = Kept(
            name=span.name,
            span_id=span.context.span_id,
            parent_id=span.parent.span_id if span.parent else 0,
            start_ns=span.start_time or 0,
            end_ns=span.end_time or 0,
            attributes=dict(span.attributes or {}),
            failed=span.status.status_code is StatusCode.ERROR,
            error=(span.status.description or "")[:MAX_ERROR],
            links=tuple(
                SpanLink(f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") for link in span.links
            ),
        )
        self.add(span.context.trace_id, kept)


class RingSpan(NonRecordingSpan):
    """A span that goes into a ring when it ends, and nowhere else. Events are not kept."""

    def __init__(self, context: SpanContext, parent_id: int, name: str, start_ns: int, ring: SpanRing) -> None:
        super().__init__(context)
        self._attributes: dict[str, Any] = {}
        self._kept = Kept(name, context.span_id, parent_id, start_ns, 0, self._attributes)
        self._ring = ring

    @property
    def start_ns(self) -> int:
        return self._kept.start_ns

    def is_recording(self) -> bool:
        return not self._kept.end_ns

    def set_attribute(self, key: str, value: Any) -> None:
        if not self._kept.end_ns:
            self._attributes[key] = value

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        if not self._kept.end_ns:
            self._attributes.update(attributes)

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        code = status.status_code if isinstance(status, Status) else status
        self._kept.failed = code is StatusCode.ERROR
        text = status.description if isinstance(status, Status) else description
        self._kept.error = (text or "")[:MAX_ERROR]

    def end(self, end_time: int | None = None) -> None:
        if not self._kept.end_ns:
            self._kept.end_ns = end_time or time.time_ns()
            self._ring.add(self._context.trace_id, self._kept)


class RingTracer:
    """Makes spans for a ring alone. Whether a caller's trace is sampled is passed on; one that begins here is not, so
    that whoever exports spans does not export parts of a trace whose beginning nobody has."""

    def __init__(self, ring: SpanRing) -> None:
        self._ring = ring

    def start(
        self, name: str, parent: SpanContext | None, attributes: Attributes | None, start_ns: int | None
    ) -> RingSpan:
        """A span below `parent`; None: it begins a trace."""
        flags = parent.trace_flags if parent else TraceFlags(TraceFlags.DEFAULT)
        trace_id = parent.trace_id if parent else random.getrandbits(128)
        context = SpanContext(trace_id, random.getrandbits(64) or 1, is_remote=False, trace_flags=flags)
        span = RingSpan(context, parent.span_id if parent else 0, name, start_ns or time.time_ns(), self._ring)
        if attributes:
            span.set_attributes(attributes)
        return span

    def record(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        parent: SpanContext | None,
        attributes: Attributes | None,
        error: str = "",
    ) -> str:
        """A span that is over. Returns its traceparent."""
        trace_id, parent_id, flags = (
            (parent.trace_id, parent.span_id, int(parent.trace_flags)) if parent else (random.getrandbits(128), 0, 0)
        )
        span_id = random.getrandbits(64) or 1
        kept = Kept(name, span_id, parent_id, start_ns, end_ns, attributes or {}, bool(error), error[:MAX_ERROR])
        self._ring.add(trace_id, kept)
        return f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}"


def _plain(value: AnyAttribute) -> AttributeValue:
    if isinstance(value, str | bool | int | float):
        return value
    return tuple(map(str, value)) if isinstance(value, tuple | list) else str(value)
