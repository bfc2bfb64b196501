"""What a process remembers of recent traces, and that it stays within bounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pdserve.core.trace import TraceSpan
from pdserve.telemetry import tracing
from pdserve.telemetry.ring import MAX_ERROR, Kept, SpanRing

SAMPLED, UNSAMPLED = f"00-{'a' * 32}-{'b' * 16}-01", f"00-{'c' * 32}-{'d' * 16}-00"


def kept(name: str = "x", size: int = 0) -> Kept:
    return Kept(name, 1, 0, 10, 20, {"text": "." * size} if size else {})


def test_the_oldest_trace_goes_first_and_whole() -> None:
    ring = SpanRing("router", traces=2)
    for trace_id in (1, 1, 2, 3):
        ring.add(trace_id, kept())
    assert len(ring) == 2
    assert ring.spans(f"{1:032x}") == ([], 0)
    assert len(ring.spans(f"{2:032x}")[0]) == len(ring.spans(f"{3:032x}")[0]) == 1


def test_one_trace_has_no_more_than_its_share_and_counts_the_rest() -> None:
    ring = SpanRing("router", traces=2, max_spans=3)
    for number in range(5):
        ring.add(1, kept(str(number)))
    spans, dropped = ring.spans(f"{1:032x}")
    assert ([span.name for span in spans], dropped) == (["0", "1", "2"], 2)


def test_bytes_are_bounded_too() -> None:
    ring = SpanRing("router", traces=1000, max_bytes=50_000)
    for trace_id in range(1, 101):
        ring.add(trace_id, kept(size=2_000))
        assert ring.bytes <= 50_000
    assert 0 < len(ring) < 25
    assert ring.spans(f"{100:032x}")[0], "the newest is there"


def test_an_id_that_is_none_finds_nothing() -> None:
    ring = SpanRing("router", traces=2)
    ring.add(1, kept())
    assert ring.spans("not hex") == ([], 0)


@contextmanager
def recording(ring: int = 8, exporter: InMemorySpanExporter | None = None) -> Iterator[None]:
    stop = tracing.setup_tracing("decode", None, exporter, ring=ring)
    try:
        yield
    finally:
        stop()


def recent(traceparent: str) -> list[TraceSpan]:
    found = tracing.recent_spans(traceparent.split("-")[1])
    assert found is not None
    return found[0]


@pytest.mark.parametrize("exports", [False, True])
def test_both_ways_of_recording_keep_the_same(exports: bool) -> None:
    """Alone, the ring makes its spans itself; beside an exporter it is handed the SDK's."""
    with recording(exporter=InMemorySpanExporter() if exports else None):
        with tracing.span("outer", SAMPLED, {"a": 1}) as outer:
            outer.set_attributes({"b": "two", "c": 3.5, "d": True, "e": ["x", "y"]})
            inner = tracing.start_span("inner", start_ns=5)
            tracing.fail_span(inner, "Unavailable", "m" * 1000)
            inner.end()
            below = tracing.record_span("over", 100, 50, tracing.traceparent_of(inner), {"f": 1}, "why")
        with pytest.raises(ValueError, match="no"), tracing.span("raises", SAMPLED):
            raise ValueError("no")
        spans = {span.name: span for span in recent(SAMPLED)}
        assert set(spans) == {"outer", "inner", "over", "raises"}
        top = spans["outer"]
        assert top.parent_span_id == "b" * 16
        assert top.attributes == {"a": 1, "b": "two", "c": 3.5, "d": True, "e": ("x", "y")}
        assert (top.service, top.worker_id, top.failed, top.error) == ("decode", "", False, "")
        assert 0 < top.start_ns <= top.end_ns
        inside = spans["inner"]
        assert (inside.parent_span_id, inside.start_ns) == (top.span_id, 5), "the current span is the parent"
        assert inside.failed and len(inside.error) == MAX_ERROR and inside.attributes["error.type"] == "Unavailable"
        over = spans["over"]
        assert (over.parent_span_id, over.start_ns, over.end_ns, over.error) == (inside.span_id, 100, 100, "why")
        assert below == f"00-{'a' * 32}-{over.span_id}-01"
        assert spans["raises"].failed and spans["raises"].error == "ValueError: no"
        tracing.fail_span(inner, "too late")  # it is over: nothing happens
        assert {span.name: span for span in recent(SAMPLED)} == spans


def test_what_a_caller_does_not_want_exported_is_kept_all_the_same() -> None:
    exporter = InMemorySpanExporter()
    with recording(exporter=exporter):
        below = tracing.record_span("quiet", 1, 2, UNSAMPLED)
        tracing.record_span("loud", 1, 2, SAMPLED)
        assert [span.name for span in exporter.get_finished_spans()] == ["loud"]
        assert [span.name for span in recent(UNSAMPLED)] == ["quiet"]
        assert below.endswith("-00"), "and so it is passed on"


def test_without_an_exporter_a_trace_begins_unsampled() -> None:
    """Else a worker with an exporter would export a trace whose beginning nobody has."""
    with recording():
        span = tracing.start_span("root")
        assert tracing.traceparent_of(span).endswith("-00")
        assert tracing.recent_spans(tracing.trace_id_of(span)) == ([], 0), "it is not over yet"
        span.end()
        [root] = recent(tracing.traceparent_of(span))
        assert (root.name, root.parent_span_id) == ("root", "")


def test_without_a_ring_and_an_exporter_a_traceparent_passes_through() -> None:
    with recording(ring=0):
        assert tracing.recent_spans("a" * 32) is None
        assert tracing.traceparent_of(tracing.start_span("x", SAMPLED)) == SAMPLED
        assert tracing.trace_id_of(tracing.start_span("x")) == ""


def test_malformed_parents_begin_a_trace() -> None:
    with recording():
        span = tracing.start_span("x", "00-zz-1-01")
        assert tracing.trace_id_of(span) not in ("", "0" * 32)
