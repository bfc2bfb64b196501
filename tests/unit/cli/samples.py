"""One request as a router tells it, for whatever prints it."""

from __future__ import annotations

from pdserve.client import FinishReason, LatencyStats, RequestState, RequestSummary, Stages, Usage

MS = 1_000_000
START = 1_700_000_000_000 * MS
USAGE = Usage(129, 6, 0, 66_048, 0, Stages(1.4, 5.0, 217.6, 22.5, 2.3, 42.5), 0, "prefill-0", "decode-0")
REQUEST = RequestSummary(
    request_id="r0",
    trace_id="0af7651916cd43dd8448eb211c80319c",
    model="tiny",
    state=RequestState.DONE,
    arrived_ns=START,
    duration_ms=400.0,
    ttft_ms=224.0,
    itl=LatencyStats(5, 47.0, 48.1, 67.3, 67.3, 67.3),
    usage=USAGE,
    workers=("prefill-0", "decode-0"),
    finish_reason=FinishReason.LENGTH,
)
