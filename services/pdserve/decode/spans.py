"""The spans of a decode worker's tickets: reserve, then receive or prefill, then decode. All are below the span that
the router named; without one there are none."""

from __future__ import annotations

from pdserve.core.sequence import EndReason
from pdserve.decode.ticket import Ticket
from pdserve.engine.outputs import ChunkDone
from pdserve.telemetry import names
from pdserve.telemetry.tracing import Attributes, fail_span, record_span, start_span, traceparent_of


def reserved(ticket: Ticket, tokens_held: int) -> None:
    """Pages are there, as of `reserved_ns`. Without a prefill worker, computing begins."""
    attributes: Attributes = {names.TICKET: ticket.id, names.CACHED_TOKENS: tokens_held}
    _record(names.SPAN_RESERVE, ticket, ticket.submitted_ns, ticket.reserved_ns, attributes)
    if ticket.peer is None and ticket.spec.traceparent:
        # It may have begun computing before it said that it has the pages.
        ticket.prefill = start_span(names.SPAN_PREFILL, ticket.spec.traceparent, attributes, ticket.submitted_ns)


def chunk(ticket: Ticket, done: ChunkDone) -> None:
    """A part of the prompt was computed here."""
    if ticket.prefill is not None:
        below = traceparent_of(ticket.prefill)
        record_span(names.SPAN_PREFILL_CHUNK, done.start, done.end, below, {names.TOKENS: done.tokens})


def ready(ticket: Ticket) -> None:
    """The prompt's KV is complete, as of `ready_ns`."""
    if ticket.prefill is not None:
        ticket.prefill.end()
    else:
        began = ticket.reserved_ns or ticket.submitted_ns
        _record(names.SPAN_RECEIVE, ticket, began, ticket.ready_ns, {names.KV_BYTES: ticket.kv_bytes})


def ended(ticket: Ticket, reason: EndReason, now: int) -> None:
    """Decoding is over, or whatever the ticket had not come to the end of before that."""
    # A router cancels what it has enough of too, so that is no failure.
    fine = reason.answer_complete or reason in (EndReason.CANCELLED, EndReason.HANDED_OFF)
    error = "" if fine else str(reason)
    why: Attributes = {names.TICKET: ticket.id, names.END_REASON: str(reason)}
    if ticket.ready_ns:
        attributes = {**why, names.TOKENS: ticket.tokens}
        below = _record(names.SPAN_DECODE, ticket, ticket.ready_ns, now, attributes, error)
        if below and ticket.stepping_ns > ticket.ready_ns:
            record_span(names.SPAN_DECODE_WAIT, ticket.ready_ns, ticket.stepping_ns, below)
    elif ticket.prefill is not None:
        if error:
            fail_span(ticket.prefill, str(reason))
        ticket.prefill.end()
    elif ticket.reserved_ns:
        _record(names.SPAN_RECEIVE, ticket, ticket.reserved_ns, now, why, error)
    else:
        _record(names.SPAN_RESERVE, ticket, ticket.submitted_ns, now, why, error)


def _record(name: str, ticket: Ticket, start: int, end: int, attributes: Attributes, error: str = "") -> str:
    if not ticket.spec.traceparent:
        return ""
    return record_span(name, start, end, ticket.spec.traceparent, attributes, error)
