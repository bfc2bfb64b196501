"""What `pdserve trace` prints, from values alone."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from pdserve.cli.trace import REQUESTS, ago, request_rows
from pdserve.cli.waterfall import Axis, bar, joined, notes, summary, waterfall
from pdserve.client import (
    LatencyStats,
    RequestState,
    Trace,
    TraceSource,
)
from pdserve.core.trace import TraceSpan
from tests.unit.cli.samples import MS, REQUEST, START


def span(service: str, name: str, span_id: str, parent: str, start: float, end: float, **more: object) -> TraceSpan:
    """`start` and `end` in milliseconds from the request's arrival."""
    worker = "" if service == "router" else f"{service}-0"
    begins, ends = START + round(start * MS), START + round(end * MS) if end else 0
    attributes = {f"pdserve.{key}": value for key, value in more.items()}
    return TraceSpan(service, worker, name, span_id, parent, begins, ends, attributes)  # type: ignore[arg-type]


SPANS = (
    span("router", "chat tiny", "a", "", 0, 400),
    span("router", "pdserve.queue", "b", "a", 0, 100),
    span("prefill", "pdserve.prefill", "c", "a", 100, 200, tokens=129),
    span("prefill", "pdserve.prefill.chunk", "d", "c", 120, 200, tokens=129),
    span("decode", "pdserve.decode", "e", "a", 200, 400, tokens=1),
)
TRACE = Trace(REQUEST, SPANS, (TraceSource("router", "", "", 2, 0, ""),))


def lines(trace: Trace, width: int, *, ascii_only: bool = True) -> list[str]:
    return [line.plain for line in waterfall(trace, width, ascii_only=ascii_only)]


def test_each_span_is_a_line_below_its_parent_with_a_bar_and_its_milliseconds() -> None:
    head, *rows = lines(TRACE, 80)
    assert [[word for word in row.split("=")[0].split() if word != "."] for row in rows] == [
        ["chat", "tiny", "router"],
        ["queue", "router"],
        ["prefill", "prefill-0"],
        ["prefill.chunk", "prefill-0"],
        ["decode", "decode-0"],
    ]
    assert [row.split()[-1] for row in rows] == ["400.0", "100.0", "100.0", "80.0", "200.0"]
    assert [len(row) - len(row.lstrip()) for row in rows] == [0, 2, 2, 4, 2]
    starts, lengths = [row.index("=") for row in rows], [row.count("=") for row in rows]
    whole = lengths[0]
    assert starts[0] == starts[1] == head.index("0 ms"), "the axis begins where the bars do"
    for length, share in zip(lengths, (1.0, 0.25, 0.25, 0.2, 0.5), strict=True):
        assert abs(length - share * whole) <= 1
    assert starts[4] + lengths[4] == starts[0] + whole, "what ends last ends with the axis"


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("width", [80, 110, 160])
def test_a_waterfall_fits(width: int, ascii_only: bool) -> None:
    told = lines(TRACE, width, ascii_only=ascii_only)
    assert max(map(len, told)) <= width
    assert max(map(len, told)) >= width - 30, "and uses the room"
    assert ascii_only == all(line.isascii() for line in told)
    assert any("129 tokens" in line for line in told) == (width >= 110)


def test_a_round_moment_is_at_its_place_on_the_axis() -> None:
    axis = Axis(START, 400 * MS, 80)
    assert list(axis.ticks()) == [(10 * number, 50.0 * number) for number in range(8)]
    for ns in (1, 999, 12_345_678, 10**13):
        ticks = list(Axis(0, ns, 40).ticks())
        assert ticks[0] == (0, 0.0) and len(ticks) <= 5


def test_bars_are_exact_to_half_a_character_and_never_empty() -> None:
    axis = Axis(0, 100, 10)

    def drawn(start: int, end: int) -> str:
        return bar(axis, start, end, "", set(), ascii_only=False).plain

    assert drawn(0, 100) == "━" * 10
    assert drawn(5, 15) == "╺╸" + " " * 8
    assert drawn(50, 50) == " " * 5 + "╸" + " " * 4
    assert drawn(100, 100) == " " * 9 + "╺"
    assert drawn(-50, 20) == "━━" + " " * 8, "what lies outside is cut"


def test_an_open_span_lasts_until_now() -> None:
    running = dataclasses.replace(REQUEST, state=RequestState.RUNNING, duration_ms=500.0)
    rows = lines(Trace(running, (span("router", "chat tiny", "a", "", 0, 0), *SPANS[1:])), 80)
    assert rows[1].endswith("500.0+")


def test_many_chunks_are_one_line() -> None:
    chunks = [
        span("prefill", "pdserve.prefill.chunk", f"k{n}", "c", 100 + 5 * n, 105 + 5 * n, tokens=64) for n in range(20)
    ]
    rows = lines(Trace(REQUEST, (*SPANS[:3], *chunks)), 120)
    [row] = [row for row in rows if "chunk" in row]
    assert "prefill.chunk x20" in row and "1280 tokens" in row and " 100.0 " in row


def test_names_that_are_too_long_are_cut() -> None:
    long = dataclasses.replace(SPANS[2], name="x" * 200, worker_id="w" * 100)
    assert max(map(len, lines(Trace(REQUEST, (SPANS[0], long)), 80))) <= 80


def test_no_spans_is_said() -> None:
    assert lines(Trace(REQUEST), 80) == ["no spans"]


def test_the_summary_says_where_the_time_went() -> None:
    assert list(summary(TRACE)) == [
        "request r0, tiny: length after 400.0 ms",
        "first token 224.0 ms = queue 1.4 + reserve 5.0 + prefill 217.6",
        "second token 67.3 ms later = transfer 22.5 + decode wait 2.3 + step 42.5",
        "between tokens p50 48.1, p99 67.3, at most 67.3 ms",
        "tokens 129 in (0 cached), 6 out, 66.0 kB of KV moved",
    ]
    failed = dataclasses.replace(
        REQUEST, state=RequestState.FAILED, finish_reason=None, code="UNAVAILABLE", ttft_ms=None, itl=LatencyStats()
    )
    assert next(summary(Trace(failed))) == "request r0, tiny: unavailable after 400.0 ms"
    assert len(list(summary(Trace(failed)))) == 2


def test_what_is_missing_failed_or_moved_is_said() -> None:
    broken = dataclasses.replace(SPANS[2], failed=True, error="no route")
    sources = (
        TraceSource("decode", "decode-0", "h:1", 0, 0, "it is not connected"),
        TraceSource("prefill", "prefill-0", "h:2", 256, 7, "", 12_000_000, 400_000),
        TraceSource("prefill", "prefill-1", "h:3", 1, 0, "", 300_000, 400_000),
    )
    assert list(notes(Trace(REQUEST, (SPANS[0], broken), sources))) == [
        "! prefill (prefill-0) failed: no route",
        "! decode-0 is missing: it is not connected",
        "! prefill-0 had no room for 7 more spans",
        "the clock of prefill-0 is 12.0 ms (+- 0.4) ahead of the router's; its spans were moved",
    ]
    called = dataclasses.replace(SPANS[0], parent_span_id="b7ad6b7169203331")
    [note] = notes(Trace(REQUEST, (called, *SPANS[1:])))
    assert "b7ad6b7169203331" in note and "caller" in note


def test_a_gateway_puts_its_own_span_on_top() -> None:
    called = dataclasses.replace(SPANS[0], parent_span_id="9")
    trace = Trace(REQUEST, (called, *SPANS[1:])).with_spans("gateway", [span("router", "POST /v1", "9", "", -5, 410)])
    assert not list(notes(trace))
    rows = lines(trace, 80)
    assert rows[1].startswith("POST /v1") and "gateway" in rows[1] and rows[2].startswith("  chat tiny")
    assert [source.service for source in trace.sources] == ["gateway"]


def test_markup_in_names_is_shown_as_it_is() -> None:
    odd = dataclasses.replace(SPANS[0], name="chat [red]x[/red]")
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=True, color_system=None).print(
        joined(waterfall(Trace(REQUEST, (odd,)), 80))
    )
    assert "chat [red]x[/red]" in out.getvalue()


def test_a_trace_is_json_as_it_is() -> None:
    told = json.loads(json.dumps(dataclasses.asdict(TRACE)))
    assert told["request"]["finish_reason"] == "length" and told["request"]["usage"]["stages"]["first_step_ms"] == 42.5
    assert told["spans"][2]["attributes"] == {"pdserve.tokens": 129}


def test_the_list_of_requests_has_a_row_for_each() -> None:
    running = dataclasses.replace(
        REQUEST, request_id="r1", state=RequestState.RUNNING, finish_reason=None, ttft_ms=None, workers=()
    )
    rows = list(request_rows([REQUEST, running], START + 65_000 * MS))
    assert rows == [
        ("r0", "tiny", "length", "prefill-0, decode-0", "1 m", "400", "224", "129 / 6"),
        ("r1", "tiny", "running", "-", "1 m", "400", "-", "129 / 6"),
    ]
    assert all(len(row) == len(REQUESTS) for row in rows)
    assert [ago(seconds) for seconds in (-3.0, 59.0, 3_700.0, 200_000.0)] == ["0 s", "59 s", "1 h", "2 d"]
