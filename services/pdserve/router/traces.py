"""Gathering one request's trace: this router's spans and those of every worker that served it."""

from __future__ import annotations

import asyncio
import time

import grpc
import grpc.aio

from pdserve.core.trace import clock_offset
from pdserve.router.fleet import Fleet
from pdserve.router.recent import Record
from pdserve.router.worker import Worker
from pdserve.rpc.convert_trace import span_to_proto
from pdserve.rpc.errors import error_from_call
from pdserve.telemetry.tracing import recent_spans
from pdserve.v1 import inference_pb2, trace_pb2, worker_pb2, worker_pb2_grpc

DEADLINE = 2.0  # seconds for all workers, who are asked at the same time

Part = tuple[trace_pb2.TraceSource, list[trace_pb2.Span]]


async def gather(record: Record, fleet: Fleet) -> inference_pb2.GetTraceResponse:
    """Ask everybody who may have spans of `record`'s request. Who has no answer in time is named in it."""
    record.summary()  # takes in which workers it was placed on by now
    known = {worker.worker_id: worker for worker in sorted(fleet.workers, key=lambda worker: worker.connected)}
    caches = [worker_id for worker_id, worker in known.items() if _role(worker) == worker_pb2.ROLE_PREFIX_CACHE]
    parts = await asyncio.gather(
        *(_ask(worker_id, known.get(worker_id), record.trace_id) for worker_id in (*record.workers, *caches))
    )
    # Afterwards, so that what ended meanwhile is not open here and over there.
    response = inference_pb2.GetTraceResponse(request=record.summary())
    spans, dropped = recent_spans(record.trace_id) or ([], 0)
    response.spans.extend(map(span_to_proto, spans))
    if (running := record.open_span()) is not None:
        response.spans.append(running)
    response.sources.add(service="router", spans=len(response.spans), dropped=dropped)
    for source, found in parts:
        response.sources.append(source)
        response.spans.extend(found)
    return response


async def _ask(worker_id: str, worker: Worker | None, trace_id: str) -> Part:
    """One worker's part, by our clock."""
    source = trace_pb2.TraceSource(worker_id=worker_id)
    if worker is None:
        source.missing = "it is not in the fleet any more"
        return source, []
    source.endpoint, source.service = worker.endpoint, _service(worker)
    if not worker.connected or worker.channel is None:
        source.missing = "it is not connected"
        return source, []
    call = worker_pb2_grpc.WorkerServiceStub(worker.channel).GetSpans(
        trace_pb2.GetSpansRequest(trace_id=trace_id), timeout=DEADLINE
    )
    sent = time.time_ns()
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        source.missing = _why(error)
        return source, []
    finally:
        call.cancel()
    source.clock_offset_ns, source.clock_error_ns = clock_offset(sent, time.time_ns(), answer.now_unix_ns)
    source.spans, source.dropped = len(answer.spans), answer.dropped
    if not answer.recording:
        source.missing = "it keeps no traces (--trace-ring 0)"
    elif not answer.spans and _role(worker) != worker_pb2.ROLE_PREFIX_CACHE:
        source.missing = "it has no spans of this request: it was restarted since, or newer ones took their place"
    return source, by_our_clock(list(answer.spans), source)


def by_our_clock(spans: list[trace_pb2.Span], source: trace_pb2.TraceSource) -> list[trace_pb2.Span]:
    """What is within the error of the measurement is left as it is: most workers share our machine, or its clock."""
    if abs(source.clock_offset_ns) > source.clock_error_ns:
        for span in spans:
            span.start_unix_ns -= source.clock_offset_ns
            span.end_unix_ns -= source.clock_offset_ns
    return spans


def _why(error: grpc.aio.AioRpcError) -> str:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"it did not answer within {DEADLINE:g} s"
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return "its version keeps no traces"
    return str(error_from_call(error))


def _role(worker: Worker) -> worker_pb2.Role.ValueType:
    return worker.snapshot.role if worker.snapshot else worker_pb2.ROLE_UNSPECIFIED


def _service(worker: Worker) -> str:
    role = _role(worker)
    return worker_pb2.Role.Name(role).removeprefix("ROLE_").lower() if role else ""
