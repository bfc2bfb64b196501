"""Histograms and counters over requests: families once for a router, and each model's part of them."""

from __future__ import annotations

from functools import partial

import grpc

from pdserve.core.slo import Outcome, Verdict
from pdserve.policy.disaggregation import Local
from pdserve.policy.draining import HandOff
from pdserve.policy.fleet import Target
from pdserve.policy.limits import Limit
from pdserve.policy.routing import Decision, Kind
from pdserve.router.meter import Ended
from pdserve.telemetry import names
from pdserve.telemetry.metrics import CollectorRegistry, Counter, count, histogram

# Seconds. Gaps are told apart finely where people notice; waits reach from nothing to a request's longest deadline.
GAP_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
WAIT_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25),
    *(0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0),
)
TTFT_BUCKETS = (*names.GENAI_TTFT_BUCKETS, 20.0, 40.0, 80.0)
DURATION_BUCKETS = (*names.GENAI_DURATION_BUCKETS, 163.84, 327.68, 655.36)
TOKEN_BUCKETS = tuple(float(2**power) for power in range(18))  # 1 to 131072
RATIO_BUCKETS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
STAGES = ("queue", "reserve", "prefill", "transfer_exposed", "decode_wait", "first_step")
ERRORS = {code.name: code.name.lower() for code in grpc.StatusCode if code is not grpc.StatusCode.OK}
OUTCOMES = ("stop", "length", *ERRORS.values())


class RequestMetrics:
    """The families. Series are made by ModelMetrics, for served models only: labels must stay few."""

    def __init__(self, registry: CollectorRegistry) -> None:
        timed = partial(histogram, registry, labels=["model_name"])
        total = partial(count, registry, labels=["model_name"])
        self.ttft = timed("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS)
        self.itl = timed("inter_token_latency_seconds", "Every gap between two tokens of an answer.", GAP_BUCKETS)
        self.tpot = timed(
            "request_time_per_output_token_seconds", "Mean gap of each answered request.", names.GENAI_TPOT_BUCKETS
        )
        self.latency = timed("e2e_request_latency_seconds", "Arrival to end of answered requests.", DURATION_BUCKETS)
        self.queue = timed("request_queue_time_seconds", "Wait for a worker, at each placement.", WAIT_BUCKETS)
        self.stage = histogram(
            registry,
            "request_stage_seconds",
            "Where the time went: queue, reserve and prefill sum to the time to first token, transfer_exposed, "
            "decode_wait and first_step to the first gap.",
            WAIT_BUCKETS,
            ["model_name", "stage"],
        )
        self.prompt_length = timed("request_prompt_tokens", "Prompt tokens of answered requests.", TOKEN_BUCKETS)
        self.answer_length = timed("request_generation_tokens", "Answer tokens of answered requests.", TOKEN_BUCKETS)
        self.prompt_tokens = total("prompt_tokens_total", "Prompt tokens of requests that got a token.")
        self.cached_tokens = total(
            "prompt_tokens_cached_total", "Prompt tokens whose KV came from a cache; in prompt_tokens_total, too."
        )
        self.generation_tokens = total("generation_tokens_total", "Answer tokens, as they come.")
        self.replays = total("request_replays_total", "Tries that began after one that failed; rearms are none.")
        self.rearms = total("request_rearms_total", "Reservations that went on with another prefill worker.")
        self.refusals = total("request_refusals_total", "Placements that a worker had no room for after all.")
        self.hand_offs = count(
            registry,
            "request_hand_offs_total",
            "Running sequences of decode workers that drain: moved, stayed as the policy says, no_room elsewhere, "
            "refused or failed (tried again, or it stays), or replayed since the worker was gone first.",
            ["model_name", "outcome"],
        )
        self.hand_off_gap = timed(
            "hand_off_gap_seconds", "From the last token on a draining worker to the first elsewhere.", GAP_BUCKETS
        )
        self.rejected = count(
            registry,
            "requests_rejected_total",
            "Requests refused at the door: for a limit of their tenant (tenant_requests, tenant_tokens) or their "
            "key (key_requests, key_tokens), or because "
            "they would have missed a target (ttft, itl) or their deadline.",
            ["model_name", "reason"],
        )
        self.decisions = count(
            registry,
            "routing_decisions_total",
            "What the router decided for requests. One that waits counts once, however often it is looked at.",
            ["model_name", "kind"],
        )
        self.local_prefills = count(
            registry,
            "routing_local_prefills_total",
            "Prompts given to decode workers, by why: quicker (conditional), KV there (held), or no_prefill_workers.",
            ["model_name", "reason"],
        )
        self.prediction = timed(
            "routing_ttft_ratio",
            "From decision to first token, as a multiple of what was predicted, once workers have told their speed.",
            RATIO_BUCKETS,
        )
        self.requests = count(
            registry,
            "requests_total",
            "Requests by how they ended: stop, length, or the status code.",
            ["model_name", "outcome"],
        )
        self.slo = count(
            registry,
            "slo_requests_total",
            "Requests by what became of their latency targets; goodput is the rate of those that met them.",
            ["model_name", "verdict"],
        )
        genai = ["gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model"]
        convention = partial(histogram, registry, namespace="gen_ai")
        self.genai_ttft = convention(
            "server_time_to_first_token_seconds",
            "Time to first token of successful responses.",
            names.GENAI_TTFT_BUCKETS,
            genai,
        )
        self.genai_tpot = convention(
            "server_time_per_output_token_seconds",
            "Time per output token after the first, of successful responses.",
            names.GENAI_TPOT_BUCKETS,
            genai,
        )
        self.genai_duration = convention(
            "server_request_duration_seconds",
            "Duration of requests, failed ones too.",
            names.GENAI_DURATION_BUCKETS,
            [*genai, "error_type"],
        )


class ModelMetrics:
    """One model's series, looked up once: telling of a token then costs a few microseconds. All begin at 0."""

    def __init__(self, families: RequestMetrics, model: str) -> None:
        self._families, self._model = families, model
        self._ttft, self._itl = families.ttft.labels(model), families.itl.labels(model)
        self._tpot, self._latency = families.tpot.labels(model), families.latency.labels(model)
        self._tokens = families.generation_tokens.labels(model)
        self._prompt_tokens, self._cached = families.prompt_tokens.labels(model), families.cached_tokens.labels(model)
        self._prompt_length = families.prompt_length.labels(model)
        self._answer_length = families.answer_length.labels(model)
        self._stages = {stage: families.stage.labels(model, stage) for stage in STAGES}
        self._requests = {outcome: families.requests.labels(model, outcome) for outcome in OUTCOMES}
        self._verdicts = {verdict: families.slo.labels(model, verdict.value) for verdict in Verdict}
        self._replays = families.replays.labels(model)
        self.queue = families.queue.labels(model)
        self.rearms, self.refusals = families.rearms.labels(model), families.refusals.labels(model)
        self.hand_offs = {outcome: families.hand_offs.labels(model, outcome.value) for outcome in HandOff}
        self.hand_off_gap = families.hand_off_gap.labels(model)
        self.turned_away: dict[Limit | Target, Counter] = {
            why: families.rejected.labels(model, why.value) for why in (*Limit, *Target)
        }
        self._decisions = {kind: families.decisions.labels(model, kind.value) for kind in Kind}
        self._locals = {why: families.local_prefills.labels(model, why.value) for why in Local}
        self._prediction = families.prediction.labels(model)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)
        self._tokens.inc()

    def gap(self, seconds: float) -> None:
        self._itl.observe(seconds)
        self._tokens.inc()

    def decided(self, decision: Decision) -> None:
        self._decisions[decision.kind].inc()
        why = decision.options[0].local if decision.options else None
        if decision.kind is Kind.LOCAL and why is not None:
            self._locals[why].inc()

    def predicted(self, predicted: float, actual: float) -> None:
        if predicted > 0:
            self._prediction.observe(max(0.0, actual) / predicted)

    def ended(self, ended: Ended) -> None:
        """Take in a request that is over."""
        usage = ended.usage
        answered = ended.outcome is Outcome.ANSWERED
        self._requests[ended.reason if answered else ERRORS[ended.code]].inc()
        if ended.verdict is not None:
            self._verdicts[ended.verdict].inc()
        self._replays.inc(usage.replays)
        if ended.ttft is not None:
            self._prompt_tokens.inc(usage.prompt_tokens)
            self._cached.inc(usage.cached_tokens)
            self._tell_stages(ended)
        if answered:
            self._latency.observe(ended.seconds)
            self._prompt_length.observe(usage.prompt_tokens)
            self._answer_length.observe(usage.completion_tokens)
        self._tell_convention(ended)

    def _tell_stages(self, ended: Ended) -> None:
        """The first three of every request with a token, so that their sums are that of the times to first token; the
        others of those with a second one."""
        for stage in STAGES if ended.usage.completion_tokens > 1 else STAGES[:3]:
            self._stages[stage].observe(getattr(ended.usage.stages, f"{stage}_ms") / 1e3)

    def _tell_convention(self, ended: Ended) -> None:
        families, labels = self._families, (ended.operation, names.PROVIDER, self._model)
        error = "" if ended.outcome is Outcome.ANSWERED else ERRORS[ended.code]
        families.genai_duration.labels(*labels, error).observe(ended.seconds)
        if error or ended.ttft is None:
            return
        families.genai_ttft.labels(*labels).observe(ended.ttft)
        if ended.usage.completion_tokens > 1:
            mean = ended.gaps_seconds / (ended.usage.completion_tokens - 1)
            families.genai_tpot.labels(*labels).observe(mean)
            self._tpot.observe(mean)
