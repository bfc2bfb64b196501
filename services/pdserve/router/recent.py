"""The most recent requests: what `pdserve trace` and `pdserve explain` can be asked for."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from pdserve.core.errors import UnknownRequest
from pdserve.core.quantiles import quantiles_of
from pdserve.router.decisions import attributes
from pdserve.router.measure import Measure
from pdserve.router.stats import latency
from pdserve.telemetry import names
from pdserve.telemetry.tracing import Span, extract, fail_span, trace_id_of, traceparent_of
from pdserve.v1 import inference_pb2, trace_pb2


class Record:
    """One request from its arrival on. The first of `done`, `failed` and `cancelled` ends it, and its span; more change
    nothing. What it was measured to be is kept, and the measure itself let go of."""

    def __init__(self, span: Span, name: str, parent: str, measure: Measure) -> None:
        """`span` is the request's, called `name`, below the traceparent `parent`."""
        self.workers: tuple[str, ...] = ()
        self.decisions = measure.decisions
        self._span, self._name, self._parent = span, name, parent
        self._tenant = ""
        self._measure: Measure | None = measure
        self._summary = inference_pb2.RequestSummary(
            trace_id=trace_id_of(span), state=inference_pb2.REQUEST_STATE_RUNNING, arrived_unix_ns=time.time_ns()
        )

    @property
    def place(self) -> tuple[str, str]:
        """Tenant and request id: other tenants' ids may be the same."""
        return self._tenant, self._summary.request_id

    @property
    def request_id(self) -> str:
        return self._summary.request_id

    @property
    def trace_id(self) -> str:
        """In hex; empty where nobody traces."""
        return self._summary.trace_id

    def named(self, request_id: str, model: str, tenant: str = "") -> None:
        """What it is called, which served model it is for, and whose it is."""
        self._tenant = tenant
        self._summary.request_id, self._summary.model = request_id, model
        self._span.set_attribute(names.REQUEST_ID, request_id)
        self._span.set_attribute(names.REQUEST_MODEL, model)

    def done(self, finish: inference_pb2.Finish) -> None:
        """It is answered."""
        self._summary.finish_reason = finish.reason
        usage = finish.usage
        reason = "stop" if finish.reason == inference_pb2.FINISH_REASON_STOP else "length"
        self._span.set_attributes(
            {
                names.USAGE_INPUT_TOKENS: usage.prompt_tokens,
                names.USAGE_OUTPUT_TOKENS: usage.completion_tokens,
                names.USAGE_CACHE_READ_TOKENS: usage.cached_tokens,
                names.RESPONSE_FINISH_REASONS: [reason],
                names.PREFILL_WORKER: usage.prefill_worker,
                names.DECODE_WORKER: usage.decode_worker,
                names.KV_BYTES: usage.kv_transfer_bytes,
                names.REPLAYS: usage.replays,
            }
        )
        self._end(inference_pb2.REQUEST_STATE_DONE)

    def failed(self, code: str, error: Exception) -> None:
        """It ends with the gRPC status code of that name."""
        if self._measure is None:
            return
        self._summary.code, self._summary.error = code, str(error)
        fail_span(self._span, type(error).__name__, str(error))
        self._end(inference_pb2.REQUEST_STATE_FAILED)

    def cancelled(self) -> None:
        """Its client left."""
        if self._measure is None:
            return
        self._span.set_attribute(names.ERROR_TYPE, "cancelled")
        self._end(inference_pb2.REQUEST_STATE_CANCELLED)

    def summary(self) -> inference_pb2.RequestSummary:
        """As it is now."""
        if self._measure is not None:
            self._take_measure(self._measure)
        return self._summary

    def open_span(self) -> trace_pb2.Span | None:
        """The request's own span while it runs: afterwards it is where all that are over are."""
        if self._measure is None:
            return None
        parent = extract(self._parent)
        return trace_pb2.Span(
            service="router",
            name=self._name,
            span_id=f"{self._span.get_span_context().span_id:016x}",
            parent_span_id=f"{parent.span_id:016x}" if parent else "",
            start_unix_ns=self._summary.arrived_unix_ns,
        )

    def _end(self, state: inference_pb2.RequestState.ValueType) -> None:
        measure = self._measure
        if measure is None:
            return
        self._take_measure(measure)
        self._summary.state, self._measure = state, None
        self.decisions.over()
        if (decision := self.decisions.telling) is not None:
            self._span.set_attributes(attributes(decision))
        complete = state == inference_pb2.REQUEST_STATE_DONE
        measure.timeline.record(traceparent_of(self._span), measure.timeline.now(), complete=complete)
        self._span.end()

    def _take_measure(self, measure: Measure) -> None:
        timeline, summary = measure.timeline, self._summary
        self.workers = tuple(measure.workers)
        summary.duration_ms = 1e3 * timeline.waited
        if timeline.ttft is not None:
            summary.ttft_ms = 1e3 * timeline.ttft
        summary.itl.CopyFrom(latency(quantiles_of(timeline.gaps)))
        summary.usage.CopyFrom(measure.usage)
        summary.usage.completion_tokens = timeline.tokens
        summary.usage.stages.CopyFrom(timeline.told())
        summary.workers[:] = self.workers


class RecentRequests:
    """The latest `size` requests by id, running ones among them. Where two of a tenant had the same id, the newer one
    counts. Who asks for those of one tenant hears of no others; None: of all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._records: OrderedDict[tuple[str, str], Record] = OrderedDict()

    def add(self, record: Record) -> None:
        """Remember a request, which has its name, and forget the oldest where there are too many."""
        if self.size:
            self._records[record.place] = record
            self._records.move_to_end(record.place)
            while len(self._records) > self.size:
                self._records.popitem(last=False)

    def get(self, request_id: str, tenant: str | None = None) -> Record:
        """The newest of that id. Raises UnknownRequest."""
        record = next((record for record in self._of(tenant) if record.request_id == request_id), None)
        if record is None:
            raise UnknownRequest(
                f"no request {request_id[:128]!r} among the latest {len(self._records)} of this router"
            )
        return record

    def latest(self, limit: int, tenant: str | None = None) -> list[Record]:
        """The newest first."""
        return list(islice(self._of(tenant), limit))

    def _of(self, tenant: str | None) -> Iterator[Record]:
        newest_first = reversed(self._records.values())
        return newest_first if tenant is None else (one for one in newest_first if one.place[0] == tenant)
