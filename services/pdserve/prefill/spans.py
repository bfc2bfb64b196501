"""The spans of one attempt on a prefill worker, below its own: what it waited for, its chunks, the way of its KV."""

from __future__ import annotations

import time

from pdserve.core.errors import PdserveError
from pdserve.engine.outputs import ChunkDone
from pdserve.prefill.call import Call
from pdserve.telemetry import names
from pdserve.telemetry.tracing import Attributes, fail_span, record_span, wall_ns
from pdserve.worker.messages import KvCommitted


def chunk(call: Call, done: ChunkDone) -> None:
    """A part of the prompt was computed; before the first one it waited."""
    if call.span.is_recording():
        if not call.first_chunk_ns:
            record_span(names.SPAN_PREFILL_QUEUE, call.sent_ns, done.start, call.traceparent)
        tokens = {names.TOKENS: done.tokens}
        record_span(names.SPAN_PREFILL_CHUNK, done.start, done.end, call.traceparent, tokens)
    call.first_chunk_ns = call.first_chunk_ns or done.end


def failure(call: Call, error: PdserveError) -> None:
    """It came to nothing."""
    if call.span.is_recording():
        fail_span(call.span, type(error).__name__, str(error))
    else:  # the prompt was computed, so what failed is the hand-off
        attributes: Attributes = {names.TICKET: call.ticket, names.DECODE_WORKER: call.peer or ""}
        began, now = call.first_chunk_ns, time.time_ns()
        record_span(names.SPAN_TRANSFER, began or now, now, call.spec.traceparent, attributes, str(error))


def transfer(call: Call, done: KvCommitted, path: str) -> None:
    """The decode worker has the KV, which took the link's `path`."""
    attributes: Attributes = {
        names.TICKET: call.ticket,
        names.KV_BYTES: done.kv_bytes,
        names.DECODE_WORKER: call.peer or "",
        names.KV_TRANSFER_SECONDS: done.seconds,
        names.KV_TRANSFER_EXPOSED_SECONDS: done.exposed,
        names.KV_LINK_PATH: path,
    }
    ended = wall_ns(done.at)
    record_span(names.SPAN_TRANSFER, ended - round(1e9 * done.seconds), ended, call.spec.traceparent, attributes)
