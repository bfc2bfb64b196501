"""One request's spans as a waterfall: a line each, its bar on a common time axis. Values in, rich text out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.text import Text

from pdserve.client import Trace, TraceSource
from pdserve.core.fabric import say_bytes
from pdserve.core.trace import Row, TraceSpan, arrange
from pdserve.telemetry import names

MS_WIDTH = 9
LEAST_BAR = 16
DETAIL_FROM = 110  # columns; below them the bars need the room
DETAIL_WIDTH = 26
TICK_WIDTH = 9
STYLES = {
    "gateway": "blue",
    "router": "cyan",
    "prefill": "yellow",
    "decode": "green",
    "prefix_cache": "magenta",
}


@dataclass(frozen=True, slots=True)
class Axis:
    """From `start_ns` on, `ns` are drawn on `cells` characters."""

    start_ns: int
    ns: int
    cells: int

    def halves(self, start_ns: int, end_ns: int) -> tuple[int, int]:
        """The first and the last half character (exclusive) of a bar: at least one."""
        whole = 2 * self.cells
        first = min(whole - 1, max(0, (start_ns - self.start_ns) * whole // self.ns))
        last = min(whole, max(first + 1, -((self.start_ns - end_ns) * whole // self.ns)))
        return first, last

    def ticks(self) -> Iterator[tuple[int, float]]:
        """(character, milliseconds) of each round moment, as many as have room for their labels."""
        total = self.ns / 1e6
        room = max(1, self.cells // TICK_WIDTH)
        steps = (digit * 10.0**power for power in range(-6, 9) for digit in (1, 2, 5))  # a nanosecond to days
        step = next(step for step in steps if total / step <= room)
        count = 0
        while count * step < total:
            cell = int(count * step / total * self.cells)
            yield cell, count * step
            count += 1


def waterfall(trace: Trace, width: int, *, ascii_only: bool = False) -> list[Text]:
    """The lines, each at most `width` characters (80 and more look well)."""
    rows = arrange(trace.spans)
    if not rows:
        return [Text("no spans")]
    now = trace.request.arrived_ns + round(1e6 * trace.request.duration_ms)
    start = min(row.span.start_ns for row in rows)
    end = max(row.span.end_ns or now for row in rows)
    labels = [label(row) for row in rows]
    places = [row.span.worker_id or row.span.service for row in rows]
    detailed = width >= DETAIL_FROM
    detail_width = DETAIL_WIDTH + 2 if detailed else 0
    place_width = min(16, max(map(len, places)))
    label_width = min(max(map(len, labels)), width - place_width - MS_WIDTH - detail_width - LEAST_BAR - 4)
    axis = Axis(start, max(1, end - start), max(1, width - label_width - place_width - MS_WIDTH - detail_width - 4))
    lines = [_head(axis, label_width, place_width)]
    guides = {cell for cell, _ in axis.ticks()}
    for row, text, place in zip(rows, labels, places, strict=True):
        span = row.span
        style = "red" if span.failed else STYLES.get(span.service, "")
        line = Text(no_wrap=True)
        line.append(_fit(text, label_width), "red" if span.failed else "")
        line.append("  ")
        line.append(_fit(place, place_width), style)
        line.append(" ")
        line.append_text(bar(axis, span.start_ns, span.end_ns or now, style, guides, ascii_only=ascii_only))
        took = ((span.end_ns or now) - span.start_ns) / 1e6
        line.append(f"{took:>{MS_WIDTH}.1f}" + (" " if span.end_ns else "+"))
        if detailed:
            line.append("  " + _fit(detail(span), DETAIL_WIDTH).rstrip(), "dim")
        line.rstrip()
        lines.append(line)
    return lines


def bar(axis: Axis, start_ns: int, end_ns: int, style: str, guides: set[int], *, ascii_only: bool) -> Text:
    """A bar and the empty time around it, `axis.cells` characters, exact to half of one."""
    first, last = axis.halves(start_ns, end_ns)
    text = Text()
    for cell in range(axis.cells):
        left, right = first <= 2 * cell < last, first <= 2 * cell + 1 < last
        if left or right:
            drawn = "=" if ascii_only else "━" if left and right else "╸" if left else "╺"
            text.append(drawn, style)
        else:
            text.append(("." if ascii_only else "┊") if cell in guides else " ", "dim")
    return text


def label(row: Row) -> str:
    """A span's name, without what all have in common, below its parent."""
    times = f" x{row.count}" if row.count > 1 else ""
    return "  " * row.depth + row.span.name.removeprefix("pdserve.") + times


def detail(span: TraceSpan) -> str:
    """What a span says of itself, in a few words."""
    if span.failed:
        return span.error
    said, attributes = [], span.attributes
    for key, say in (
        (names.USAGE_INPUT_TOKENS, lambda value: f"{value} in"),
        (names.USAGE_OUTPUT_TOKENS, lambda value: f"{value} out"),
        (names.TOKENS, lambda value: f"{value} token{'s' * (value != 1)}"),
        (names.CACHED_TOKENS, lambda value: f"{value} cached" if value else ""),
        (names.BLOCKS, lambda value: f"{value} blocks"),
        (names.KV_BYTES, lambda value: say_bytes(value) if value else ""),
        (names.KV_LINK_PATH, str),
    ):
        if key in attributes and (text := say(attributes[key])):
            said.append(text)
    return ", ".join(said)


def notes(trace: Trace) -> Iterator[str]:
    """What is missing, failed or was put right, a sentence each."""
    for row in arrange(trace.spans, fold=0):
        span = row.span
        if span.failed and span.error:
            yield f"! {span.name.removeprefix('pdserve.')} ({span.worker_id or span.service}) failed: {span.error}"
    for source in trace.sources:
        yield from _of_source(source)
    known = {span.span_id for span in trace.spans}
    callers = {span.parent_span_id for span in trace.spans if span.parent_span_id} - known
    if callers and not any(source.missing for source in trace.sources):
        yield f"called from span {', '.join(sorted(callers))}, which is the caller's own and not known here"


def summary(trace: Trace) -> Iterator[str]:
    """What the request was, and where its time went."""
    request, usage = trace.request, trace.request.usage
    outcome = request.finish_reason.value if request.finish_reason else request.code.lower() or request.state.value
    yield f"request {request.request_id}, {request.model}: {outcome} after {request.duration_ms:.1f} ms"
    stages = usage.stages
    if request.ttft_ms is not None:
        parts = f"queue {stages.queue_ms:.1f} + reserve {stages.reserve_ms:.1f} + prefill {stages.prefill_ms:.1f}"
        yield f"first token {request.ttft_ms:.1f} ms = {parts}"
    if request.itl.count:
        second = stages.transfer_exposed_ms, stages.decode_wait_ms, stages.first_step_ms
        parts = "transfer {:.1f} + decode wait {:.1f} + step {:.1f}".format(*second)
        yield f"second token {sum(second):.1f} ms later = {parts}"
        gaps = request.itl
        yield f"between tokens p50 {gaps.p50_ms:.1f}, p99 {gaps.p99_ms:.1f}, at most {gaps.max_ms:.1f} ms"
    tokens = f"tokens {usage.prompt_tokens} in ({usage.cached_tokens} cached), {usage.completion_tokens} out"
    moved = f", {say_bytes(usage.kv_transfer_bytes)} of KV moved" if usage.kv_transfer_bytes else ""
    yield tokens + moved + (f", replayed {usage.replays} times" if usage.replays else "")


def _of_source(source: TraceSource) -> Iterator[str]:
    who = source.worker_id or source.service
    if source.missing:
        yield f"! {who} is missing: {source.missing}"
    if source.dropped:
        yield f"! {who} had no room for {source.dropped} more spans"
    if source.moved:
        ahead, error = source.clock_offset_ns / 1e6, source.clock_error_ns / 1e6
        side = "ahead of" if ahead > 0 else "behind"
        yield f"the clock of {who} is {abs(ahead):.1f} ms (+- {error:.1f}) {side} the router's; its spans were moved"


def _head(axis: Axis, label_width: int, place_width: int) -> Text:
    cells = [" "] * axis.cells
    for number, (cell, ms) in enumerate(axis.ticks()):
        said = f"{ms:g} ms" if not number else f"{ms:g}"
        if cell + len(said) <= axis.cells:
            cells[cell : cell + len(said)] = said
    head = f"{'span':<{label_width}}  {'where':<{place_width}} {''.join(cells)}{'ms':>{MS_WIDTH}}"
    return Text(head.rstrip(), style="bold", no_wrap=True)


def _fit(text: str, width: int) -> str:
    return f"{text:<{width}}" if len(text) <= width else text[: max(0, width - 1)] + "~"


def joined(lines: Iterable[Text]) -> Text:
    """Lines as one text, for printing."""
    return Text("\n").join(lines)
