"""Traces: one per request, from the client over the router into the workers.

Context travels as W3C ``traceparent`` strings (in gRPC metadata and in SequenceSpec), because a request crosses
queues and shared streams where Python's context does not follow. Spans go to an OTLP endpoint where there is one, and
into a ring in memory (see `ring`), where `pdserve trace` finds them. With neither, none is recorded and a caller's
traceparent passes through unchanged.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Protocol

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import AlwaysRecordSampler
from opentelemetry.trace import NonRecordingSpan, NoOpTracer, Span, SpanContext, StatusCode, TraceFlags

from pdserve.core.trace import TraceSpan
from pdserve.telemetry import names
from pdserve.telemetry.resource import resource
from pdserve.telemetry.ring import Attributes, RingTracer, SpanRing

__all__ = [
    "MAX_TRACEPARENT",
    "TRACEPARENT",
    "Attributes",
    "Span",
    "bounded_traceparent",
    "current_traceparent",
    "extract",
    "fail_span",
    "recent_spans",
    "record_span",
    "setup_tracing",
    "span",
    "start_span",
    "trace_id_of",
    "traceparent_of",
]

TRACEPARENT = "traceparent"
# Characters. Version 00 has 55; a later one may say more behind them.
MAX_TRACEPARENT = 256

# Version ff is none, and 00 has nothing behind the flags.
_FORMAT = re.compile(r"(?!ff|00.{54})[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")


class _Tracer(Protocol):
    def start(
        self, name: str, parent: SpanContext | None, attributes: Attributes | None, start_ns: int | None
    ) -> Span: ...
    def record(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        parent: SpanContext | None,
        attributes: Attributes | None,
        error: str = "",
    ) -> str: ...


class _SdkTracer:
    """OpenTelemetry's own tracer, behind what `RingTracer` offers too."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    def start(self, name: str, parent: SpanContext | None, attributes: Attributes | None, start_ns: int | None) -> Span:
        # An empty context, not None: that would be this task's, and the caller has looked there.
        context = trace.set_span_in_context(NonRecordingSpan(parent)) if parent else otel_context.Context()
        return self._tracer.start_span(name, context=context, attributes=attributes, start_time=start_ns)

    def record(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        parent: SpanContext | None,
        attributes: Attributes | None,
        error: str = "",
    ) -> str:
        started = self.start(name, parent, attributes, start_ns)
        if error:
            started.set_status(StatusCode.ERROR, error)
        started.end(end_ns)
        return traceparent_of(started)


# Ours, not OpenTelemetry's global: that one can be set only once in a process, and tests set up many services.
_NOTHING = _SdkTracer(NoOpTracer())
_tracer: _Tracer = _NOTHING
_ring: SpanRing | None = None


def setup_tracing(
    service: str,
    endpoint: str | None,
    exporter: SpanExporter | None = None,
    *,
    ring: int = 0,
    instance: str = "",
) -> Callable[[], None]:
    """Record this process's spans: send them to an OTLP gRPC `endpoint` (None: to nobody), and keep those of the latest
    `ring` traces in memory. They are those of a `service`, and of its process called `instance`.

    `exporter` replaces OTLP and gets each span as it ends (tests). Returns what flushes and stops recording; it
    blocks for as long as the exporter needs (at most about 10 s), so call it off the event loop. The last set-up wins.
    """
    global _tracer, _ring
    spans = SpanRing(service, ring) if ring else None
    exports = endpoint is not None or exporter is not None
    provider = _provider(resource(service, instance), endpoint, exporter) if exports else None
    tracer: _Tracer = _NOTHING if spans is None else RingTracer(spans)
    if provider is not None:
        if spans is not None:
            provider.add_span_processor(spans)
            provider.sampler = AlwaysRecordSampler(provider.sampler)  # exporters leave out what is not sampled
        tracer = _SdkTracer(provider.get_tracer("pdserve"))
    if tracer is not _NOTHING:
        _tracer, _ring = tracer, spans

    def shutdown() -> None:
        global _tracer, _ring
        if _tracer is tracer:
            _tracer, _ring = _NOTHING, None
        if provider is not None:
            provider.shutdown()

    return shutdown


def _provider(who: Resource, endpoint: str | None, exporter: SpanExporter | None) -> TracerProvider:
    provider = TracerProvider(resource=who)
    if exporter is not None:
        provider.add_span_processor(SimpleSpanProcessor(exporter))
    else:
        # Imported only where it is used: it brings its own generated stubs, a third of a second.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        insecure = not (endpoint or "").startswith("https://")
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=insecure)))
    return provider


def recent_spans(trace_id: str) -> tuple[list[TraceSpan], int] | None:
    """What this process still has of a trace, by its id in hex, and how many spans there was no room for; None where it
    keeps no traces."""
    return _ring.spans(trace_id) if _ring is not None else None


def traceparent_of(span: Span) -> str:
    """The string that makes others' spans children of `span`; empty where nobody traces."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def trace_id_of(span: Span) -> str:
    """The id of the trace that `span` is part of, in hex; empty where nobody traces."""
    context = span.get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


def current_traceparent() -> str:
    """`traceparent_of` the span that this task is in."""
    return traceparent_of(trace.get_current_span())


def bounded_traceparent(given: str) -> str:
    """What a caller gave, to keep and pass on; empty where it is longer than any traceparent."""
    return given if len(given) <= MAX_TRACEPARENT else ""


def extract(traceparent: str) -> SpanContext | None:
    """The span that a caller named; None for an empty or malformed string (a bad header never fails a request)."""
    match = _FORMAT.fullmatch(bounded_traceparent(traceparent))
    return _context(match[1], match[2], match[3]) if match else None


@lru_cache(maxsize=1024)  # a request's spans, and its messages to workers, share one
def _context(trace_id: str, span_id: str, flags: str) -> SpanContext | None:
    context = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
    return context if context.is_valid else None


@contextmanager
def span(name: str, parent_traceparent: str = "", attributes: Attributes | None = None) -> Iterator[Span]:
    """A span around a block, current within it. An exception marks it as failed and passes on.

    Without a parent it goes under this task's current span, or starts a trace.
    """
    started = start_span(name, parent_traceparent, attributes)
    with trace.use_span(started, end_on_exit=True):
        yield started


def start_span(
    name: str, parent_traceparent: str = "", attributes: Attributes | None = None, start_ns: int | None = None
) -> Span:
    """A span that the caller ends itself (`.end()`), for work that no one block surrounds. Not made current."""
    return _tracer.start(name, _parent(parent_traceparent), attributes, start_ns)


def record_span(
    name: str,
    start_ns: int,
    end_ns: int,
    parent_traceparent: str = "",
    attributes: Attributes | None = None,
    error: str = "",
) -> str:
    """Record something that is over, by wall-clock nanoseconds; `error` says why it failed, where it did.

    Returns the traceparent for spans below it. The caller must not change `attributes` afterwards.
    """
    return _tracer.record(name, start_ns, max(start_ns, end_ns), _parent(parent_traceparent), attributes, error)


def wall_ns(at: float) -> int:
    """The wall-clock nanoseconds of something that was at `at` on the monotonic clock, which all processes of a machine
    share."""
    return time.time_ns() - round(1e9 * (time.monotonic() - at))


def fail_span(span: Span, kind: str, message: str = "") -> None:
    """Mark a span as failed: `kind` is an error's type, `message` says more. Nothing happens to one that is over.

    Neither may quote prompt or answer.
    """
    if not span.is_recording():
        return
    span.set_attribute(names.ERROR_TYPE, kind)
    span.set_status(StatusCode.ERROR, message or kind)


def _parent(traceparent: str) -> SpanContext | None:
    found = extract(traceparent) if traceparent else None
    if found is not None:
        return found
    current = trace.get_current_span().get_span_context()
    return current if current.is_valid else None
