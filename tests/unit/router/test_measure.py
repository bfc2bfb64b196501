"""One request is measured once, from the one place where its tokens are timed, and told to every meter alike."""

from __future__ import annotations

import time
from typing import Any

import grpc
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.core.errors import InvalidRequest
from pdserve.core.slo import Outcome, SloTargets, Verdict
from pdserve.router.measure import Measure, promised
from pdserve.router.meter import Ended, Meter
from pdserve.router.metrics import RouterMetrics
from pdserve.v1 import inference_pb2

MS = 1_000_000
TARGETS = SloTargets(ttft=0.5, itl=0.05, itl_percentile=99.0)
LENGTH = inference_pb2.Finish(reason=inference_pb2.FINISH_REASON_LENGTH)


class Heard(Meter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def first_token(self, model: str, seconds: float) -> None:
        self.calls.append(("first", model, round(seconds, 6)))

    def gap(self, model: str, seconds: float) -> None:
        self.calls.append(("gap", round(seconds, 6)))

    def rejected(self, code: str) -> None:
        self.calls.append(("rejected", code))

    def ended(self, ended: Ended) -> None:
        self.calls.append(("ended", ended.outcome, ended.code, ended.verdict, ended.usage.completion_tokens))


def measured(*meters: Meter) -> Measure:
    measure = Measure(meters, "chat")
    measure.started("tiny", TARGETS)
    measure.timeline.arrived -= 1000 * MS  # so that stamps below lie in the past
    return measure


def test_each_token_is_told_to_each_meter_with_its_own_gap() -> None:
    heard, too = Heard(), Heard()
    measure = measured(heard, too)
    at = measure.timeline.arrived
    measure.timeline.token(at + 100 * MS, 1, took=0.09)
    measure.timeline.token(at + 130 * MS, 2, took=0.02)
    measure.timeline.token(at + 330 * MS, 3)
    measure.answered(LENGTH)
    measure.cancelled()  # the client hung up right after the end
    assert heard.calls == too.calls
    assert heard.calls == [
        ("first", "tiny", 0.1),
        ("gap", 0.03),
        ("gap", 0.2),
        ("ended", Outcome.ANSWERED, "OK", Verdict.MISSED_ITL, 3),
    ]


def test_a_second_token_that_came_before_the_first_is_seen_with_it() -> None:
    heard = Heard()
    measure = measured(heard)
    measure.timeline.token(measure.timeline.arrived + 100 * MS, 1)
    measure.timeline.token(measure.timeline.arrived + 90 * MS, 2)
    measure.timeline.tell()
    measure.timeline.token(measure.timeline.arrived + 140 * MS, 3)
    for _ in range(2):
        measure.timeline.tell()
    assert heard.calls[1:] == [("gap", 0.0), ("gap", 0.04)]


@pytest.mark.parametrize(
    ("code", "outcome", "verdict"),
    [
        ("INVALID_ARGUMENT", Outcome.REFUSED, None),
        ("NOT_FOUND", Outcome.REFUSED, None),
        ("RESOURCE_EXHAUSTED", Outcome.FAILED, Verdict.FAILED),
        ("UNAVAILABLE", Outcome.FAILED, Verdict.FAILED),
        ("INTERNAL", Outcome.FAILED, Verdict.FAILED),
        ("DEADLINE_EXCEEDED", Outcome.EXPIRED, Verdict.MISSED_TTFT),  # a second went by without a token
    ],
)
def test_failures_are_the_deployments_or_the_clients(code: str, outcome: Outcome, verdict: Verdict | None) -> None:
    heard = Heard()
    measured(heard).failed(grpc.StatusCode[code])
    assert heard.calls == [("ended", outcome, code, verdict, 0)]


@pytest.mark.parametrize(
    ("code", "outcome"), [("CANCELLED", Outcome.CANCELLED), ("DEADLINE_EXCEEDED", Outcome.EXPIRED)]
)
@pytest.mark.parametrize(
    ("sending", "verdict"), [(False, Verdict.MISSED_ITL), (True, None)], ids=["workers wedged", "client does not read"]
)
def test_a_stall_after_the_last_token_counts_unless_it_is_the_clients(
    code: str, outcome: Outcome, sending: bool, verdict: Verdict | None
) -> None:
    heard = Heard()
    measure = measured(heard)
    measure.timeline.token(measure.timeline.arrived + 100 * MS, 1)  # 900 ms ago
    measure.timeline.sending = sending
    measure.cancelled() if code == "CANCELLED" else measure.failed(grpc.StatusCode[code])
    assert heard.calls[1:] == [("ended", outcome, code, verdict, 1)]


def test_a_request_for_no_served_model_is_only_counted() -> None:
    heard = Heard()
    Measure([heard], "chat").failed(grpc.StatusCode.NOT_FOUND)
    assert heard.calls == [("rejected", "NOT_FOUND")]


def test_a_request_may_name_targets_of_its_own() -> None:
    own = inference_pb2.SloTargets(itl_ms=20)
    assert promised(own, TARGETS) == SloTargets(0.5, 0.02, 99.0)
    assert promised(inference_pb2.SloTargets(), TARGETS) == TARGETS
    for field in ("ttft_ms", "itl_ms"):
        for value in (0.0, -1.0, float("inf"), float("nan")):
            with pytest.raises(InvalidRequest, match=f"slo.{field}"):
                promised(inference_pb2.SloTargets(**{field: value}), TARGETS)


def router_metrics() -> RouterMetrics:
    metrics = RouterMetrics(TARGETS)
    metrics.serve(["tiny"])
    return metrics


def values(metrics: RouterMetrics) -> dict[tuple[str, ...], float]:
    text = generate_latest(metrics.registry).decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {(sample.name, *sorted(sample.labels.values())): sample.value for sample in samples}


def test_a_placement_is_heard_of_once_and_not_before_it_is_told() -> None:
    metrics = router_metrics()
    measure, count = measured(metrics), ("pdserve_request_queue_time_seconds_count", "tiny")
    measure.timeline.queued(0.004)
    assert values(metrics)[count] == 0
    for _ in range(2):
        measure.timeline.tell()
        assert values(metrics)[count] == 1


def test_what_is_exported_is_what_was_measured() -> None:
    metrics = router_metrics()
    measure = measured(metrics)
    at = measure.timeline.arrived
    measure.timeline.dispatch(at + 10 * MS)
    measure.usage.prompt_tokens, measure.usage.cached_tokens, measure.usage.replays = 40, 16, 2
    for number, stamp in enumerate((60, 90, 130), 1):
        measure.timeline.token(at + stamp * MS, number, took=0.02)
    measure.timeline.queued(0.004)
    measure.refused()
    measure.rearmed()
    measure.answered(LENGTH)
    found = values(metrics)
    expected = {
        ("pdserve_time_to_first_token_seconds_sum", "tiny"): 0.06,
        ("pdserve_inter_token_latency_seconds_sum", "tiny"): 0.07,
        ("pdserve_inter_token_latency_seconds_count", "tiny"): 2,
        ("pdserve_request_time_per_output_token_seconds_sum", "tiny"): 0.035,
        ("pdserve_request_stage_seconds_sum", "queue", "tiny"): 0.01,
        ("pdserve_request_stage_seconds_sum", "reserve", "tiny"): 0.03,
        ("pdserve_request_stage_seconds_sum", "prefill", "tiny"): 0.02,
        ("pdserve_request_stage_seconds_sum", "first_step", "tiny"): 0.02,
        ("pdserve_request_queue_time_seconds_sum", "tiny"): 0.004,
        ("pdserve_generation_tokens_total", "tiny"): 3,
        ("pdserve_prompt_tokens_total", "tiny"): 40,
        ("pdserve_prompt_tokens_cached_total", "tiny"): 16,
        ("pdserve_request_replays_total", "tiny"): 2,
        ("pdserve_request_refusals_total", "tiny"): 1,
        ("pdserve_request_rearms_total", "tiny"): 1,
        ("pdserve_requests_total", "length", "tiny"): 1,
        ("pdserve_requests_total", "stop", "tiny"): 0,
        ("pdserve_slo_requests_total", "met", "tiny"): 1,
        ("gen_ai_server_time_to_first_token_seconds_sum", "chat", "pdserve", "tiny"): 0.06,
    }
    assert {key: found.get(key) for key in expected} == pytest.approx(expected)


def test_telling_of_a_token_costs_microseconds() -> None:
    """A router may pass on tens of thousands of tokens a second."""
    measure = measured(router_metrics())
    at, count = measure.timeline.arrived, 5000
    began = time.process_time()
    for number in range(1, count + 1):
        measure.timeline.token(at + number, number)
    assert (time.process_time() - began) / count < 50e-6


def test_every_series_of_a_served_model_begins_at_0() -> None:
    """So that the first failure is an increase, which alerts can see."""
    found = values(router_metrics())
    assert found["pdserve_requests_total", "internal", "tiny"] == 0
    assert found["pdserve_slo_requests_total", "failed", "tiny"] == 0
