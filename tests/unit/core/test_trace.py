"""How spans are put in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.trace import TraceSpan, arrange, clock_offset


def span(name: str, span_id: str, parent: str = "", start: int = 0, end: int = 100, **more: object) -> TraceSpan:
    return TraceSpan("prefill", "prefill-0", name, span_id, parent, start, end, more)  # type: ignore[arg-type]


def test_children_follow_their_parent_in_order_of_their_start() -> None:
    spans = [
        span("late", "c", "a", start=50),
        span("inner", "d", "b", start=20),
        span("early", "b", "a", start=10),
        span("root", "a", "caller"),
    ]
    rows = [(row.span.name, row.depth) for row in arrange(spans)]
    assert rows == [("root", 0), ("early", 1), ("inner", 2), ("late", 1)]


def test_a_span_whose_parent_is_not_there_is_a_root() -> None:
    rows = [(row.span.name, row.depth) for row in arrange([span("one", "a", "gone", 5), span("two", "b", "", 3)])]
    assert rows == [("two", 0), ("one", 0)]


def test_many_equal_siblings_are_one_row_with_their_sums() -> None:
    chunks = [
        span("chunk", f"c{number}", "a", start=10 * number, end=10 * number + 9, tokens=64, path="x", done=True)
        for number in range(9)
    ]
    rows = arrange([span("root", "a"), *chunks, span("other", "z", "a", start=15)])
    assert [(row.span.name, row.depth, row.count) for row in rows] == [("root", 0, 1), ("chunk", 1, 9), ("other", 1, 1)]
    folded = rows[1].span
    assert (folded.start_ns, folded.end_ns, folded.attributes) == (0, 89, {"tokens": 9 * 64})
    assert len(arrange([span("root", "a"), *chunks], fold=0)) == 10
    assert len(arrange([span("root", "a"), *chunks[:8]])) == 9, "eight are not many"


def test_siblings_with_children_are_never_folded() -> None:
    spans = [span("root", "a")]
    for number in range(9):
        spans += [span("fetch", f"f{number}", "a"), span("read", f"r{number}", f"f{number}")]
    assert len(arrange(spans)) == 19


def test_an_open_span_leaves_the_fold_open() -> None:
    spans = [span("root", "a"), *(span("chunk", f"c{number}", "a", end=0 if number == 3 else 9) for number in range(9))]
    assert arrange(spans)[1].span.end_ns == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 50)), max_size=20))
def test_no_span_is_lost_or_told_twice_but_for_circles(edges: list[tuple[int, int, int]]) -> None:
    spans = {f"s{own}": span("x", f"s{own}", f"s{parent}", start) for own, parent, start in edges}
    told = [row.span.span_id for row in arrange(spans.values(), fold=0)]
    assert len(told) == len(set(told))

    def rooted(span_id: str) -> bool:
        seen = set()
        while span_id in spans and span_id not in seen:
            seen.add(span_id)
            span_id = spans[span_id].parent_span_id
        return span_id not in spans

    assert set(told) == {span_id for span_id in spans if rooted(span_id)}


def test_a_clock_offset_is_known_to_half_the_round_trip() -> None:
    assert clock_offset(1_000, 3_000, 2_000) == (0, 1_000)
    assert clock_offset(1_000, 3_000, 1_002_500) == (1_000_500, 1_000)
    assert clock_offset(1_000, 1_000, 0) == (-1_000, 0)
