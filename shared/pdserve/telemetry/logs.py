"""Logs: one JSON object a line on stderr, with the trace, span and request that a task is working for.

Prompt text, token ids and answers are never logged.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from opentelemetry import trace
from structlog.typing import EventDict, WrappedLogger


def add_trace(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Add trace_id and span_id of the span that this task is in, unless the caller named others."""
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event.setdefault("trace_id", f"{context.trace_id:032x}")
        event.setdefault("span_id", f"{context.span_id:016x}")
    return event


def setup_logs(service: str, level: str = "info") -> None:
    """Log this process's events, and those of libraries that use `logging`, as `service`. May be called again."""

    def add_service(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        event["service"] = service
        return event

    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_service,
        add_trace,
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries are told less than we are: their chatter below a warning is about themselves.
    root.setLevel(max(number, logging.WARNING))


@contextmanager
def log_request(request_id: str) -> Iterator[None]:
    """Put `request_id` on everything that this task, and those it starts, logs inside the block."""
    bound = structlog.contextvars.bind_contextvars(request_id=request_id)
    try:
        yield
    finally:
        structlog.contextvars.reset_contextvars(**bound)
