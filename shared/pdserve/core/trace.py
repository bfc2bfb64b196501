"""Spans as values: what one service did for a request and when; and how the spans of one trace hang together.

Times are Unix nanoseconds. Nothing in here knows where spans come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

AttributeValue = str | bool | int | float | tuple[str, ...]

FOLD = 8  # more equal siblings than this are shown as one


@dataclass(frozen=True, slots=True)
class SpanLink:
    """A span of this or another trace that has to do with one, without being its parent. Ids in hex."""

    trace_id: str
    span_id: str


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One span. Ids in hex; `parent_span_id` is empty where a trace begins. `end_ns` is 0 while the span is open.

    `failed` says that what it stands for failed, `error` why, where that is known.
    """

    service: str
    worker_id: str
    name: str
    span_id: str
    parent_span_id: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict, hash=False)
    failed: bool = False
    error: str = ""
    links: tuple[SpanLink, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a waterfall: a span, how deep it hangs, and how many equal siblings it stands for."""

    span: TraceSpan
    depth: int
    count: int = 1


def arrange(spans: Iterable[TraceSpan], fold: int = FOLD) -> list[Row]:
    """Every span once, each below its parent, siblings by start. Spans whose parent is not there are roots.

    More than `fold` siblings without children that share name and worker become one row from the first one's start to
    the last one's end, its numbers summed up; 0: no folding.
    """
    by_id = {span.span_id: span for span in spans}
    children: dict[str, list[TraceSpan]] = {}
    roots = []
    for span in sorted(by_id.values(), key=lambda span: (span.start_ns, -(span.end_ns or span.start_ns))):
        if span.parent_span_id in by_id:
            children.setdefault(span.parent_span_id, []).append(span)
        else:
            roots.append(span)
    rows: list[Row] = []
    stack = [Row(root, 0) for root in reversed(roots)]
    while stack:
        row = stack.pop()
        rows.append(row)
        below = children.pop(row.span.span_id, []) if row.count == 1 else []
        stack += reversed([Row(span, row.depth + 1, count) for span, count in _folded(below, children, fold)])
    return rows


def _folded(
    siblings: Sequence[TraceSpan], children: Mapping[str, Sequence[TraceSpan]], fold: int
) -> Iterable[tuple[TraceSpan, int]]:
    """Siblings in order, with many equal ones in the place of their first."""
    groups: dict[tuple[str, str, str], list[TraceSpan]] = {}
    for span in siblings:
        if span.span_id not in children:
            groups.setdefault((span.service, span.worker_id, span.name), []).append(span)
    for span in siblings:
        group = groups.get((span.service, span.worker_id, span.name), [])
        if not fold or len(group) <= fold or span.span_id in children:
            yield span, 1
        elif span is group[0]:
            yield _sum(group), len(group)


def _sum(group: Sequence[TraceSpan]) -> TraceSpan:
    sums: dict[str, AttributeValue] = {}
    for span in group:
        for key, value in span.attributes.items():
            before = sums.get(key, 0)
            if isinstance(value, int | float) and isinstance(before, int | float) and not isinstance(value, bool):
                sums[key] = before + value
    end_ns = 0 if any(not span.end_ns for span in group) else max(span.end_ns for span in group)
    failed = any(span.failed for span in group)
    return replace(group[0], end_ns=end_ns, attributes=sums, failed=failed)


def clock_offset(sent_ns: int, received_ns: int, theirs_ns: int) -> tuple[int, int]:
    """How far a peer's clock is ahead of ours, and how much that may be off, in nanoseconds.

    The peer read its clock at some moment between our sending the question and our receiving the answer (as in NTP,
    RFC 5905, section 8).
    """
    error = max(0, received_ns - sent_ns) // 2
    return theirs_ns - (sent_ns + error), error
