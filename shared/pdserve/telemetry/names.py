"""Names of spans and attributes, in one place because OpenTelemetry's GenAI conventions still move.

Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/ (in development); `pdserve.*` are our own.
"""

from __future__ import annotations

# GenAI attributes.
OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
USAGE_CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"

OPERATION_CHAT = "chat"
OPERATION_TEXT_COMPLETION = "text_completion"
PROVIDER = "pdserve"

# Of any failed span.
ERROR_TYPE = "error.type"

# Our spans. Router: the request's life. Workers: what they computed and moved, under the router's spans.
SPAN_TRY = "pdserve.try"
SPAN_QUEUE = "pdserve.queue"
SPAN_RESERVE = "pdserve.reserve"
SPAN_PREFILL = "pdserve.prefill"
SPAN_PREFILL_QUEUE = "pdserve.prefill.queue"
SPAN_PREFILL_CHUNK = "pdserve.prefill.chunk"
SPAN_PREFIX_FETCH = "pdserve.prefix.fetch"
SPAN_PREFIX_LOOKUP = "pdserve.prefix.lookup"
SPAN_PREFIX_READ = "pdserve.prefix.read"
SPAN_TRANSFER = "pdserve.transfer"
SPAN_RECEIVE = "pdserve.receive"
SPAN_HAND_OFF = "pdserve.hand_off"
SPAN_DECODE_WAIT = "pdserve.decode_wait"
SPAN_FIRST_STEP = "pdserve.first_step"
SPAN_DECODE = "pdserve.decode"

# Our attributes.
REQUEST_ID = "pdserve.request_id"
TICKET = "pdserve.ticket"
ATTEMPT = "pdserve.attempt"
WORKER = "pdserve.worker"
PREFILL_WORKER = "pdserve.prefill_worker"
DECODE_WORKER = "pdserve.decode_worker"
ROUTING_KIND = "pdserve.routing.kind"
ROUTING_REASON = "pdserve.routing.reason"
ROUTING_CANDIDATES = "pdserve.routing.candidates"
ROUTING_TTFT_SECONDS = "pdserve.routing.ttft_seconds"  # predicted, from the decision on
ROUTING_GAP_SECONDS = "pdserve.routing.gap_seconds"
TOKENS = "pdserve.tokens"
CACHED_TOKENS = "pdserve.cached_tokens"
BLOCKS = "pdserve.blocks"
KV_BYTES = "pdserve.kv_bytes"
KV_TRANSFER_SECONDS = "pdserve.kv_transfer.seconds"
KV_TRANSFER_EXPOSED_SECONDS = "pdserve.kv_transfer.exposed_seconds"
KV_LINK_PATH = "pdserve.kv_link.path"
REPLAYS = "pdserve.replays"
END_REASON = "pdserve.end_reason"

# Metrics of the GenAI conventions by the names that they have in Prometheus, and their attributes by those of labels;
# then the buckets that the conventions ask for, in seconds.
GENAI_METRICS = {
    "gen_ai_server_time_to_first_token_seconds": "gen_ai.server.time_to_first_token",
    "gen_ai_server_time_per_output_token_seconds": "gen_ai.server.time_per_output_token",
    "gen_ai_server_request_duration_seconds": "gen_ai.server.request.duration",
}
GENAI_LABELS = {
    "gen_ai_operation_name": OPERATION_NAME,
    "gen_ai_provider_name": PROVIDER_NAME,
    "gen_ai_request_model": REQUEST_MODEL,
    "error_type": ERROR_TYPE,
}
GENAI_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
GENAI_TPOT_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
GENAI_DURATION_BUCKETS = tuple(0.01 * 2**power for power in range(14))  # 10 ms to 82 s
