"""Which requests a router remembers, and what of each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdserve.core.errors import Unavailable, UnknownRequest
from pdserve.core.trace import TraceSpan
from pdserve.router.measure import Measure
from pdserve.router.recent import RecentRequests, Record
from pdserve.router.traces import by_our_clock
from pdserve.telemetry import tracing
from pdserve.v1 import inference_pb2, trace_pb2

CALLER = f"00-{'a' * 32}-{'b' * 16}-00"
MS = 1_000_000


@pytest.fixture(autouse=True)
def _recording() -> Iterator[None]:
    stop = tracing.setup_tracing("router", None, ring=16)
    yield
    stop()


def record(request_id: str, measure: Measure | None = None, tenant: str = "") -> Record:
    made = Record(tracing.start_span("chat tiny", CALLER), "chat tiny", CALLER, measure or Measure((), "chat"))
    made.named(request_id, "tiny", tenant)
    return made


def spans_of(made: Record) -> dict[str, TraceSpan]:
    found = tracing.recent_spans(made.trace_id)
    assert found is not None
    return {span.name: span for span in found[0]}


def measured() -> Measure:
    """A hand-off: 20 ms in the queue, 5 for the reservation, 30 to compute, 3 + 2 + 8 to the second token, 40 more."""
    measure = Measure((), "chat")
    timeline = measure.timeline
    start = timeline.arrived
    timeline.dispatch(start + 20 * MS)
    timeline.reserved = start + 25 * MS
    timeline.token(start + 55 * MS, 1)
    timeline.ready = start + 58 * MS
    timeline.token(start + 68 * MS, 2, took=0.008)
    timeline.token(start + 108 * MS, 3)
    measure.workers = dict.fromkeys(("prefill-0", "decode-1"))
    return measure


def test_the_oldest_is_forgotten_and_the_newest_is_first() -> None:
    recent = RecentRequests(2)
    for name in ("a", "b", "c"):
        recent.add(record(name))
    assert [made.request_id for made in recent.latest(10)] == ["c", "b"]
    assert [made.request_id for made in recent.latest(1)] == ["c"]
    with pytest.raises(UnknownRequest, match="'a'"):
        recent.get("a")


def test_of_two_with_one_id_the_newer_counts() -> None:
    recent = RecentRequests(3)
    first, second = record("same"), record("same")
    for made in (first, record("other"), second):
        recent.add(made)
    assert recent.get("same") is second and len(recent.latest(9)) == 2


def test_a_tenant_is_told_of_its_own_alone() -> None:
    """Its requests are not pushed aside by another's of the same id; nobody in particular sees all."""
    recent = RecentRequests(4)
    ours, theirs, more = record("same", tenant="a"), record("same", tenant="b"), record("x", tenant="b")
    for made in (ours, theirs, more):
        recent.add(made)
    assert recent.get("same", "a") is ours and recent.get("same", "b") is theirs is recent.get("same")
    assert recent.latest(9, "a") == [ours] and recent.latest(1, "b") == [more]
    assert recent.latest(9) == [more, theirs, ours]
    with pytest.raises(UnknownRequest):
        recent.get("x", "a")


def test_without_room_nothing_is_kept() -> None:
    recent = RecentRequests(0)
    recent.add(record("a"))
    assert recent.latest(5) == []


def test_a_request_that_runs_has_an_open_span_below_its_caller() -> None:
    made = record("a", measured())
    summary, span = made.summary(), made.open_span()
    assert (summary.state, summary.request_id, summary.model) == (inference_pb2.REQUEST_STATE_RUNNING, "a", "tiny")
    assert summary.ttft_ms == pytest.approx(55.0) and list(summary.workers) == ["prefill-0", "decode-1"]
    assert span is not None
    assert (span.name, span.parent_span_id, span.end_unix_ns) == ("chat tiny", "b" * 16, 0)
    assert span.start_unix_ns == summary.arrived_unix_ns
    made.cancelled()
    assert made.open_span() is None, "it is over"
    assert spans_of(made)["chat tiny"].span_id == span.span_id


def test_stages_are_spans_one_after_the_other_that_sum_to_the_stages() -> None:
    made = record("a", measured())
    finish = inference_pb2.Finish(reason=inference_pb2.FINISH_REASON_STOP, usage={"prompt_tokens": 7})
    made.done(finish)
    spans, stages = spans_of(made), made.summary().usage.stages
    told = [
        ("queue", stages.queue_ms, 20.0),
        ("reserve", stages.reserve_ms, 5.0),
        ("prefill", stages.prefill_ms, 30.0),
        ("transfer", stages.transfer_exposed_ms, 3.0),
        ("decode_wait", stages.decode_wait_ms, 2.0),
        ("first_step", stages.first_step_ms, 8.0),
    ]
    root, at = spans["chat tiny"], spans["pdserve.queue"].start_ns
    for name, stage, expected in told:
        span = spans[f"pdserve.{name}"]
        assert stage == pytest.approx(expected)
        assert span.end_ns - span.start_ns == round(expected * MS) and span.start_ns == at
        assert span.parent_span_id == root.span_id
        at = span.end_ns
    assert spans["pdserve.decode"].start_ns == at, "the rest is decoding"
    assert root.attributes["gen_ai.usage.input_tokens"] == 7 and not root.failed
    assert root.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    summary = made.summary()
    assert (summary.state, summary.itl.count) == (inference_pb2.REQUEST_STATE_DONE, 2)
    assert (summary.itl.p50_ms, summary.itl.max_ms) == (pytest.approx(13.0), pytest.approx(40.0))


def test_a_request_that_fails_while_it_waits_was_in_the_queue_until_then() -> None:
    made = record("a")
    made.failed("RESOURCE_EXHAUSTED", Unavailable("no room"))
    made.failed("INTERNAL", Unavailable("again"))
    made.cancelled()
    summary, spans = made.summary(), spans_of(made)
    assert (summary.code, summary.error) == ("RESOURCE_EXHAUSTED", "no room"), "the first end counts"
    assert summary.state == inference_pb2.REQUEST_STATE_FAILED and not summary.HasField("ttft_ms")
    root = spans["chat tiny"]
    assert root.failed and root.error == "no room" and root.attributes["error.type"] == "Unavailable"
    assert set(spans) == {"chat tiny", "pdserve.queue"}


def test_a_request_that_fails_while_it_is_computed_was_in_prefill_until_then() -> None:
    measure = Measure((), "chat")
    measure.timeline.dispatch(measure.timeline.arrived + 1)
    made = record("a", measure)
    made.cancelled()
    assert set(spans_of(made)) == {"chat tiny", "pdserve.queue", "pdserve.prefill"}
    assert made.summary().state == inference_pb2.REQUEST_STATE_CANCELLED


@pytest.mark.parametrize(
    ("handover", "ready", "expected"),
    [
        (True, 0, {"pdserve.transfer": (55, None)}),
        (True, 58, {"pdserve.transfer": (55, 58), "pdserve.decode_wait": (58, None)}),
        (True, 50, {"pdserve.decode_wait": (55, None)}),
        (False, 0, {"pdserve.decode_wait": (55, None)}),
    ],
    ids=["in transfer", "transferred", "transferred early", "no transfer"],
)
def test_a_request_that_ends_before_its_second_token_shows_the_stage_that_it_waited_in(
    handover: bool, ready: int, expected: dict[str, tuple[int, int | None]]
) -> None:
    measure = Measure((), "chat")
    timeline = measure.timeline
    timeline.arrived -= 1000 * MS
    start = timeline.arrived
    timeline.dispatch(start + 20 * MS, handover=handover)
    timeline.token(start + 55 * MS, 1)
    timeline.ready = start + ready * MS if ready else 0
    made = record("a", measure)
    made.cancelled()
    spans = spans_of(made)
    root, at = spans.pop("chat tiny"), start + timeline.offset
    assert set(spans) == {"pdserve.queue", "pdserve.prefill", *expected}
    for name, (began, ended) in expected.items():
        assert spans[name].start_ns == at + began * MS and spans[name].parent_span_id == root.span_id
        if ended is None:
            assert spans[name].end_ns >= at + 1000 * MS, "it lasted until the end"
        else:
            assert spans[name].end_ns == at + ended * MS


def test_an_answer_of_one_token_has_no_unfinished_stage() -> None:
    measure = Measure((), "chat")
    measure.timeline.dispatch(measure.timeline.arrived + MS, handover=True)
    measure.timeline.token(measure.timeline.arrived + 2 * MS, 1)
    made = record("a", measure)
    made.done(inference_pb2.Finish(reason=inference_pb2.FINISH_REASON_LENGTH))
    assert set(spans_of(made)) == {"chat tiny", "pdserve.queue", "pdserve.prefill"}


def test_spans_are_moved_only_by_what_is_surely_a_difference() -> None:
    def moved(offset: int, error: int) -> tuple[int, int]:
        source = trace_pb2.TraceSource(clock_offset_ns=offset, clock_error_ns=error)
        [span] = by_our_clock([trace_pb2.Span(start_unix_ns=1000, end_unix_ns=1500)], source)
        return span.start_unix_ns, span.end_unix_ns

    assert moved(300, 300) == moved(-300, 300) == (1000, 1500)
    assert moved(400, 300) == (600, 1100)
    assert moved(-400, 300) == (1400, 1900)
