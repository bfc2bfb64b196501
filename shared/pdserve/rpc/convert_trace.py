"""Spans: core's values to protobuf and back, and a process's answer to who asks for its part of a trace."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from pdserve.core.errors import InvalidRequest
from pdserve.core.trace import AttributeValue, SpanLink, TraceSpan
from pdserve.telemetry.tracing import recent_spans
from pdserve.v1 import trace_pb2

_TRACE_ID = re.compile(r"[0-9a-f]{32}")


def answer_get_spans(request: trace_pb2.GetSpansRequest, worker_id: str) -> trace_pb2.GetSpansResponse:
    """What this process, which is `worker_id`, has of a trace. Raises InvalidRequest."""
    if not _TRACE_ID.fullmatch(request.trace_id):
        raise InvalidRequest("trace_id", "must be 32 lower-case hex digits")
    found = recent_spans(request.trace_id)
    spans, dropped = found or ([], 0)
    response = trace_pb2.GetSpansResponse(dropped=dropped, recording=found is not None)
    response.spans.extend(span_to_proto(span, worker_id) for span in spans)
    response.now_unix_ns = time.time_ns()
    return response


def span_to_proto(span: TraceSpan, worker_id: str = "") -> trace_pb2.Span:
    """`worker_id` takes the place of a span's own, where it has none."""
    return trace_pb2.Span(
        service=span.service,
        worker_id=span.worker_id or worker_id,
        name=span.name,
        span_id=span.span_id,
        parent_span_id=span.parent_span_id,
        start_unix_ns=span.start_ns,
        end_unix_ns=span.end_ns,
        attributes={key: _value_to_proto(value) for key, value in span.attributes.items()},
        status=trace_pb2.SPAN_STATUS_FAILED if span.failed else trace_pb2.SPAN_STATUS_UNSPECIFIED,
        error=span.error,
        links=[trace_pb2.SpanLink(trace_id=link.trace_id, span_id=link.span_id) for link in span.links],
    )


def span_from_proto(span: trace_pb2.Span) -> TraceSpan:
    return TraceSpan(
        service=span.service,
        worker_id=span.worker_id,
        name=span.name,
        span_id=span.span_id,
        parent_span_id=span.parent_span_id,
        start_ns=span.start_unix_ns,
        end_ns=span.end_unix_ns,
        attributes=dict(_attributes(span)),
        failed=span.status == trace_pb2.SPAN_STATUS_FAILED,
        error=span.error,
        links=tuple(SpanLink(link.trace_id, link.span_id) for link in span.links),
    )


def _attributes(span: trace_pb2.Span) -> Iterable[tuple[str, AttributeValue]]:
    """In order of their names: a protobuf map has none of its own."""
    for key in sorted(span.attributes):
        value = span.attributes[key]
        match value.WhichOneof("value"):
            case "string_value":
                yield key, value.string_value
            case "bool_value":
                yield key, value.bool_value
            case "int_value":
                yield key, value.int_value
            case "double_value":
                yield key, value.double_value
            case "strings_value":
                yield key, tuple(value.strings_value.values)


def _value_to_proto(value: AttributeValue) -> trace_pb2.AttributeValue:
    if isinstance(value, bool):  # which is an int too
        return trace_pb2.AttributeValue(bool_value=value)
    if isinstance(value, int):
        return trace_pb2.AttributeValue(int_value=value)
    if isinstance(value, float):
        return trace_pb2.AttributeValue(double_value=value)
    if isinstance(value, str):
        return trace_pb2.AttributeValue(string_value=value)
    return trace_pb2.AttributeValue(strings_value=trace_pb2.StringList(values=value))
