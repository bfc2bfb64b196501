"""Spans travel unchanged."""

from __future__ import annotations

import pytest

from pdserve.core.errors import InvalidRequest
from pdserve.core.trace import SpanLink, TraceSpan
from pdserve.rpc.convert_trace import answer_get_spans, span_from_proto, span_to_proto
from pdserve.telemetry import tracing
from pdserve.v1 import trace_pb2

SPAN = TraceSpan(
    service="decode",
    worker_id="decode-0",
    name="pdserve.decode",
    span_id="b7ad6b7169203331",
    parent_span_id="00f067aa0ba902b7",
    start_ns=1_700_000_000_000_000_001,
    end_ns=0,
    attributes={"b": True, "i": -7, "f": 0.25, "s": "text", "l": ("x", "y"), "zero": 0, "no": False},
    failed=True,
    error="why",
    links=(SpanLink("0af7651916cd43dd8448eb211c80319c", "00f067aa0ba902b7"),),
)


def test_a_span_comes_back_as_it_was() -> None:
    back = span_from_proto(trace_pb2.Span.FromString(span_to_proto(SPAN).SerializeToString()))
    assert back == SPAN
    assert {key: type(value) for key, value in back.attributes.items()} == {
        key: type(value) for key, value in SPAN.attributes.items()
    }


def test_a_span_without_a_worker_gets_its_process_s() -> None:
    assert span_to_proto(TraceSpan("decode", "", "x", "1", "", 1, 2), "decode-7").worker_id == "decode-7"
    assert span_to_proto(SPAN, "decode-7").worker_id == "decode-0"


def test_a_process_answers_with_what_it_has() -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    stop = tracing.setup_tracing("decode", None, ring=4)
    try:
        tracing.record_span("x", 1, 2, f"00-{trace_id}-00f067aa0ba902b7-00")
        answer = answer_get_spans(trace_pb2.GetSpansRequest(trace_id=trace_id), "decode-0")
        assert answer.recording and answer.dropped == 0 and answer.now_unix_ns > 0
        assert [(span.name, span.service, span.worker_id) for span in answer.spans] == [("x", "decode", "decode-0")]
        assert not answer_get_spans(trace_pb2.GetSpansRequest(trace_id="f" * 32), "decode-0").spans
    finally:
        stop()
    assert not answer_get_spans(trace_pb2.GetSpansRequest(trace_id=trace_id), "decode-0").recording


@pytest.mark.parametrize("trace_id", ["", "abc", "G" * 32, "A" * 32, "a" * 33])
def test_ids_are_checked(trace_id: str) -> None:
    with pytest.raises(InvalidRequest, match="trace_id"):
        answer_get_spans(trace_pb2.GetSpansRequest(trace_id=trace_id), "decode-0")
