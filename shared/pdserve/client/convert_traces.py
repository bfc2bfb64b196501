"""Traces and statistics, from the public API's messages."""

from __future__ import annotations

from pdserve.client.convert import reason_from_proto, usage_from_proto
from pdserve.client.stats import LatencyStats, ModelStats, Stats
from pdserve.client.traces import RequestState, RequestSummary, Trace, TraceSource
from pdserve.rpc.convert_trace import span_from_proto
from pdserve.v1 import inference_pb2, stats_pb2, trace_pb2

_STATES = {
    inference_pb2.REQUEST_STATE_DONE: RequestState.DONE,
    inference_pb2.REQUEST_STATE_FAILED: RequestState.FAILED,
    inference_pb2.REQUEST_STATE_CANCELLED: RequestState.CANCELLED,
}


def summary_from_proto(request: inference_pb2.RequestSummary) -> RequestSummary:
    return RequestSummary(
        request_id=request.request_id,
        trace_id=request.trace_id,
        model=request.model,
        state=_STATES.get(request.state, RequestState.RUNNING),
        arrived_ns=request.arrived_unix_ns,
        duration_ms=request.duration_ms,
        ttft_ms=request.ttft_ms if request.HasField("ttft_ms") else None,
        itl=_latency(request.itl),
        usage=usage_from_proto(request.usage),
        workers=tuple(request.workers),
        finish_reason=reason_from_proto(request.finish_reason) if request.finish_reason else None,
        code=request.code,
        error=request.error,
    )


def trace_from_proto(answer: inference_pb2.GetTraceResponse) -> Trace:
    return Trace(
        request=summary_from_proto(answer.request),
        spans=tuple(map(span_from_proto, answer.spans)),
        sources=tuple(map(_source, answer.sources)),
    )


def stats_from_proto(answer: stats_pb2.GetStatsResponse) -> Stats:
    return Stats(
        router_id=answer.router_id,
        window_seconds=answer.window_seconds,
        models=tuple(map(_model, answer.models)),
        ttft_target_ms=answer.ttft_target_ms,
        itl_target_ms=answer.itl_target_ms,
        itl_target_percentile=answer.itl_target_percentile,
    )


def _source(source: trace_pb2.TraceSource) -> TraceSource:
    return TraceSource(
        service=source.service,
        worker_id=source.worker_id,
        endpoint=source.endpoint,
        spans=source.spans,
        dropped=source.dropped,
        missing=source.missing,
        clock_offset_ns=source.clock_offset_ns,
        clock_error_ns=source.clock_error_ns,
    )


def _model(model: stats_pb2.ModelStats) -> ModelStats:
    return ModelStats(
        model=model.model,
        running=model.running,
        waiting=model.waiting,
        completed=model.completed,
        good=model.good,
        failed=model.failed,
        cancelled=model.cancelled,
        ttft=_latency(model.ttft),
        itl=_latency(model.itl),
        queue=_latency(model.queue),
        requests_per_second=model.requests_per_second,
        output_tokens_per_second=model.output_tokens_per_second,
        prompt_tokens_per_second=model.prompt_tokens_per_second,
        goodput=model.goodput,
        cache_hit_rate=model.cache_hit_rate,
        replays=model.replays,
    )


def _latency(stats: stats_pb2.LatencyStats) -> LatencyStats:
    return LatencyStats(stats.count, stats.mean_ms, stats.p50_ms, stats.p90_ms, stats.p99_ms, stats.max_ms)
