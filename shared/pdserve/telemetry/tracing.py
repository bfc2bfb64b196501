"""Traces: one per request, from the client over the router into the workers.

Context travels as W3C ``traceparent`` strings (in gRPC metadata and in SequenceSpec), because a request crosses
queues and shared streams where Python's context does not follow. Without an exporter no span is recorded, and a
caller's traceparent passes through unchanged: that costs microseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.trace import NonRecordingSpan, NoOpTracer, Span, SpanContext, TraceFlags, Tracer
from opentelemetry.util.types import AttributeValue

__all__ = [
    "TRACEPARENT",
    "Attributes",
    "Span",
    "current_traceparent",
    "extract",
    "record_span",
    "setup_tracing",
    "span",
    "start_span",
    "traceparent_of",
]

TRACEPARENT = "traceparent"
Attributes = Mapping[str, AttributeValue]

_FORMAT = re.compile(r"^[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
# Ours, not OpenTelemetry's global: that one can be set only once in a process, and tests set up many services.
_tracer: Tracer = NoOpTracer()


def setup_tracing(service: str, endpoint: str | None, exporter: SpanExporter | None = None) -> Callable[[], None]:
    """Record this process's spans as `service` and send them to an OTLP gRPC `endpoint`; None: record nothing.

    `exporter` replaces OTLP and gets each span as it ends (tests). Returns what flushes and stops exporting; it
    blocks for as long as the exporter needs (at most about 10 s), so call it off the event loop. The last set-up wins.
    """
    global _tracer
    if endpoint is None and exporter is None:
        return lambda: None
    provider = TracerProvider(resource=Resource.create({"service.name": service, "service.namespace": "pdserve"}))
    if exporter is not None:
        provider.add_span_processor(SimpleSpanProcessor(exporter))
    else:
        # Imported only where it is used: it brings its own generated stubs, a third of a second.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        insecure = not (endpoint or "").startswith("https://")
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=insecure)))
    tracer = provider.get_tracer("pdserve")
    _tracer = tracer

    def shutdown() -> None:
        global _tracer
        if _tracer is tracer:
            _tracer = NoOpTracer()
        provider.shutdown()

    return shutdown


def traceparent_of(span: Span) -> str:
    """The string that makes others' spans children of `span`; empty where nobody traces."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def current_traceparent() -> str:
    """`traceparent_of` the span that this task is in."""
    return traceparent_of(trace.get_current_span())


def extract(traceparent: str) -> SpanContext | None:
    """The span that a caller named; None for an empty or malformed string (a bad header never fails a request)."""
    match = _FORMAT.match(traceparent)
    if match is None:
        return None
    context = SpanContext(
        int(match[1], 16), int(match[2], 16), is_remote=True, trace_flags=TraceFlags(int(match[3], 16))
    )
    return context if context.is_valid else None


@contextmanager
def span(name: str, parent_traceparent: str = "", attributes: Attributes | None = None) -> Iterator[Span]:
    """A span around a block, current within it. An exception marks it as failed and passes on.

    Without a parent it goes under this task's current span, or starts a trace.
    """
    started = _tracer.start_span(name, context=_parent(parent_traceparent), attributes=attributes)
    with trace.use_span(started, end_on_exit=True):
        yield started


def start_span(
    name: str, parent_traceparent: str = "", attributes: Attributes | None = None, start_ns: int | None = None
) -> Span:
    """A span that the caller ends itself (`.end()`), for work that no one block surrounds. Not made current."""
    return _tracer.start_span(name, context=_parent(parent_traceparent), attributes=attributes, start_time=start_ns)


def record_span(
    name: str,
    start_ns: int,
    end_ns: int,
    parent_traceparent: str = "",
    attributes: Attributes | None = None,
) -> str:
    """Record something that is over, by wall-clock nanoseconds. Returns the traceparent for spans below it."""
    started = start_span(name, parent_traceparent, attributes, start_ns)
    started.end(max(start_ns, end_ns))
    return traceparent_of(started)


def _parent(traceparent: str) -> otel_context.Context | None:
    found = extract(traceparent) if traceparent else None
    return trace.set_span_in_context(NonRecordingSpan(found)) if found else None
