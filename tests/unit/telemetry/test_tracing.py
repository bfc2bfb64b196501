"""What a caller says of its trace: read where it is well-formed, and never kept or passed on where it is too long."""

from __future__ import annotations

import time

import pytest

from pdserve.telemetry import tracing

GIVEN = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.mark.parametrize("given", [GIVEN, f"01{GIVEN[2:]}", f"cc{GIVEN[2:]}-", f"cc{GIVEN[2:]}-what-comes-later"])
def test_a_traceparent_of_any_version_is_read(given: str) -> None:
    context = tracing.extract(given)
    assert context is not None and context.is_remote
    assert (context.trace_id, context.span_id, context.trace_flags) == (int("a" * 32, 16), int("b" * 16, 16), 1)


@pytest.mark.parametrize(
    "given",
    [
        "",
        "00-zz-1-01",
        GIVEN.upper(),
        GIVEN[:-1],
        f"{GIVEN}x",
        f"{GIVEN}\n",
        f"{GIVEN}-00 has nothing here",
        f"cc{GIVEN[2:]}x",
        f"ff{GIVEN[2:]}",
        f"00-{'0' * 32}-{'b' * 16}-01",
        f"00-{'a' * 32}-{'0' * 16}-01",
        f"cc{GIVEN[2:]}-{'x' * tracing.MAX_TRACEPARENT}",
    ],
)
def test_what_is_none_names_no_span(given: str) -> None:
    assert tracing.extract(given) is None


def test_nothing_of_a_malformed_or_long_one_is_kept() -> None:
    tracing._context.cache_clear()
    for length in (1, 100, 10_000_000):
        assert tracing.extract("x" * length) is None
        tracing.extract(f"cc{GIVEN[2:]}-{'x' * length}")  # what is behind the flags is not kept, either
    assert tracing._context.cache_info().currsize == 1
    tracing.extract(GIVEN)
    assert tracing._context.cache_info().currsize == 1


def test_one_of_any_length_that_can_be_is_passed_on() -> None:
    longest = "x" * tracing.MAX_TRACEPARENT
    assert tracing.MAX_TRACEPARENT == 256
    assert tracing.bounded_traceparent(longest) == longest
    assert tracing.bounded_traceparent(f"{longest}x") == ""


def test_what_is_heard_of_late_is_shown_where_it_was() -> None:
    """An engine tells of a transfer's end after the step it is in: the span ends with the transfer."""
    at = time.monotonic() - 5.0
    before = time.time_ns()
    told = tracing.wall_ns(at)
    assert before - 65_000_000_000 < told <= time.time_ns() - 5_000_000_000
