"""Requests and traces as the page draws them."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest

from pdserve.client import RequestState, RequestSummary, Stages, Trace, TraceSource, Usage
from pdserve.client.stats import LatencyStats
from pdserve.core.trace import TraceSpan
from pdserve.gateway.console_view import describe_request, describe_trace

T0 = 1_795_999_524_884_743_998  # ns; more digits than JavaScript's numbers have
STAGES = Stages(queue_ms=1, reserve_ms=2, prefill_ms=3, transfer_exposed_ms=0, decode_wait_ms=1, first_step_ms=1)
USAGE = Usage(
    prompt_tokens=36,
    completion_tokens=5,
    cached_tokens=0,
    kv_transfer_bytes=1_658_880,
    blocks_reused=0,
    stages=STAGES,
    replays=0,
    prefill_worker="prefill-0",
    decode_worker="decode-0",
)
REQUEST = RequestSummary(
    request_id="r",
    trace_id="0" * 31 + "1",
    model="m",
    state=RequestState.DONE,
    arrived_ns=T0 + 500_000,
    duration_ms=9.0,
    ttft_ms=6.0,
    itl=LatencyStats(),
    usage=USAGE,
    workers=("prefill-0", "decode-0"),
)
ROUTER = TraceSpan("router", "", "chat m", "a", "", T0, T0 + 9_000_000)
DECODE = TraceSpan(
    "decode", "decode-0", "pdserve.decode", "b", "a", T0 + 6_000_000, T0 + 8_500_000, {"pdserve.tokens": 4}
)


def test_rows_are_in_milliseconds_below_their_parents() -> None:
    trace = describe_trace(Trace(REQUEST, (DECODE, ROUTER)))
    assert [(row["service"], row["worker"], row["depth"]) for row in trace["rows"]] == [
        ("router", "", 0),
        ("decode", "decode-0", 1),
    ]
    [_, decode] = trace["rows"]
    assert (decode["start_ms"], decode["end_ms"], decode["attributes"]) == (6.0, 8.5, {"pdserve.tokens": 4})
    assert trace["arrived_at_ms"] == 0.5
    assert trace["complete"] and trace["missing"] == []


@pytest.mark.parametrize(
    ("state", "end_ns", "complete"),
    [
        (RequestState.RUNNING, 0, False),
        (RequestState.RUNNING, T0 + 1, False),
        (RequestState.DONE, 0, False),
        (RequestState.CANCELLED, T0 + 1, True),
    ],
)
def test_it_is_complete_when_nothing_more_can_come(state: RequestState, end_ns: int, complete: bool) -> None:
    trace = describe_trace(Trace(replace(REQUEST, state=state), (replace(ROUTER, end_ns=end_ns),)))
    assert trace["complete"] is complete
    assert trace["rows"][0]["end_ms"] == (1e-6 if end_ns else None)


def test_who_could_not_be_asked_is_named() -> None:
    gone = TraceSource("decode", "decode-0", "127.0.0.1:1", 0, 0, "unreachable")
    here = TraceSource("router", "", "", 1, 0, "")
    assert describe_trace(Trace(REQUEST, (ROUTER,), (here, gone)))["missing"] == ["decode-0 (unreachable)"]


def test_it_is_json_that_javascript_reads_exactly() -> None:
    """No number is above 2**53, even where nothing is known but the request."""
    for answer in (describe_trace(Trace(REQUEST, (ROUTER, DECODE))), describe_trace(Trace(REQUEST))):
        text = msgspec.json.encode(answer)
        assert max(map(abs, _numbers(json.loads(text)))) < 2**53
    assert describe_request(REQUEST)["arrived_ms"] == pytest.approx(REQUEST.arrived_ns / 1e6)


def _numbers(value: object) -> list[float]:
    if isinstance(value, dict):
        return [number for part in value.values() for number in _numbers(part)]
    if isinstance(value, list):
        return [number for part in value for number in _numbers(part)]
    return [value] if isinstance(value, int | float) else [0]
