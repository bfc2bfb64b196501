"""Requests and traces as the page draws them: milliseconds from a request's arrival, rows in their order.

Pure functions. Nanoseconds since 1970 do not fit JavaScript's numbers, so they stay on this side.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pdserve.client import RequestState, RequestSummary, Trace
from pdserve.core.trace import Row, arrange


def describe_request(request: RequestSummary) -> dict[str, Any]:
    """Its fields, with `arrived_ms` (Unix time) for `arrived_ns`."""
    fields = asdict(request)
    arrived_ns = fields.pop("arrived_ns")
    return {**fields, "arrived_ms": arrived_ns / 1e6}


def describe_trace(trace: Trace) -> dict[str, Any]:
    """{"request", "arrived_at_ms", "rows", "missing", "complete"}: rows as `arrange` has them, `missing` the processes
    whose part is not here and why, `complete` whether nothing more is to be expected."""
    rows = arrange(trace.spans)
    origin = min((row.span.start_ns for row in rows), default=trace.request.arrived_ns)
    missing = {source.worker_id or source.service: source.missing for source in trace.sources if source.missing}
    over = trace.request.state is not RequestState.RUNNING
    return {
        "request": describe_request(trace.request),
        "arrived_at_ms": (trace.request.arrived_ns - origin) / 1e6,
        "rows": [_describe_row(row, origin) for row in rows],
        "missing": [f"{who} ({why})" for who, why in missing.items()],
        "complete": over and all(row.span.end_ns for row in rows),
    }


def _describe_row(row: Row, origin: int) -> dict[str, Any]:
    """`end_ms` is null while the span is open."""
    span = row.span
    return {
        "id": span.span_id,
        "service": span.service,
        "worker": span.worker_id,
        "name": span.name,
        "depth": row.depth,
        "count": row.count,
        "start_ms": (span.start_ns - origin) / 1e6,
        "end_ms": (span.end_ns - origin) / 1e6 if span.end_ns else None,
        "attributes": dict(span.attributes),
        "failed": span.failed,
        "error": span.error,
    }
