"""A registry arrives at a real OTLP receiver as it is: kinds, units, labels, buckets, and the conventions' names."""

from __future__ import annotations

import time
from typing import Any

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE, Metric

from pdserve.telemetry import names
from pdserve.telemetry.metrics import CollectorRegistry, count, gauge, histogram
from pdserve.telemetry.otlp_metrics import OtlpMetrics
from pdserve.telemetry.resource import resource
from tests.otlp_receiver import Attributes, OtlpReceiver


class Level:
    def collect(self) -> list[object]:
        return [gauge("level", "A level.", {("a",): 0.5, ("b",): 2.0}, ["part"])]


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(Level())  # type: ignore[arg-type]
    count(registry, "moved_bytes_total", "Bytes.", ["direction"]).labels("sent").inc(7)
    waits = histogram(registry, "wait_seconds", "Waits.", (0.1, 1.0), ["model_name"]).labels("tiny")
    for seconds in (0.05, 0.5, 0.6, 5.0):
        waits.observe(seconds)
    labels = ["gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "error_type"]
    name = "server_request_duration_seconds"
    duration = histogram(registry, name, "Durations.", names.GENAI_DURATION_BUCKETS, labels, "gen_ai")
    duration.labels("chat", "pdserve", "tiny", "").observe(0.3)
    duration.labels("chat", "pdserve", "tiny", "unavailable").observe(0.1)
    return registry


@pytest.fixture
def sent(registry: CollectorRegistry) -> list[tuple[Metric, Attributes, Any]]:
    """What one export, at the end, makes of it."""
    with OtlpReceiver() as receiver:
        OtlpMetrics(registry, resource("router", "r0"), receiver.endpoint).start().stop()
        assert len(receiver.metrics) == 1
        return list(receiver.series("pdserve-router"))


def test_kinds_units_and_labels_survive(sent: list[tuple[Metric, Attributes, Any]]) -> None:
    found = {(metric.name, *sorted(labels.values())): (metric, point) for metric, labels, point in sent}
    counter, point = found["pdserve_moved_bytes", "sent"]
    assert counter.sum.is_monotonic and counter.sum.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
    assert counter.unit == "By" and point.as_double == 7
    assert 0 < point.start_time_unix_nano < point.time_unix_nano <= time.time_ns()
    assert {found["pdserve_level", part][1].as_double for part in "ab"} == {0.5, 2.0}


def test_a_histogram_keeps_its_buckets(sent: list[tuple[Metric, Attributes, Any]]) -> None:
    [(metric, labels, point)] = [item for item in sent if item[0].name == "pdserve_wait_seconds"]
    assert metric.unit == "s" and labels == {"model_name": "tiny"}
    assert list(point.explicit_bounds) == [0.1, 1.0] and list(point.bucket_counts) == [1, 2, 1]
    assert point.count == 4 and point.sum == pytest.approx(6.15)
    assert not point.HasField("min") and not point.HasField("max"), "not known, so not told"


def test_the_genai_conventions_are_spelt_as_they_are_there(sent: list[tuple[Metric, Attributes, Any]]) -> None:
    points = [item for item in sent if item[0].name == "gen_ai.server.request.duration"]
    common = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "pdserve", "gen_ai.request.model": "tiny"}
    assert [labels for _, labels, _ in points] == [common, {**common, "error.type": "unavailable"}]
    assert list(points[0][2].explicit_bounds) == list(names.GENAI_DURATION_BUCKETS)
    assert names.GENAI_DURATION_BUCKETS[:4] == (0.01, 0.02, 0.04, 0.08) and len(names.GENAI_DURATION_BUCKETS) == 14


def test_it_goes_on_every_interval_and_at_the_end() -> None:
    registry = CollectorRegistry()
    total = count(registry, "things_total", "Things.")
    with OtlpReceiver() as receiver:
        exporter = OtlpMetrics(registry, resource("decode"), receiver.endpoint, interval=0.01).start()
        receiver.wait(lambda receiver: len(receiver.metrics) >= 3)
        total.inc(5)
        exporter.stop()
        [(_, _, point)] = receiver.series("pdserve-decode")
        assert point.as_double == 5, "what was counted last is not lost"


def test_a_collector_that_is_away_costs_nothing_but_its_own_time() -> None:
    """An endpoint where nobody listens: the end is not held up for long, and nothing raises."""
    with OtlpReceiver() as receiver:
        gone = receiver.endpoint
    registry = CollectorRegistry()
    count(registry, "things_total", "Things.").inc()
    began = time.monotonic()
    OtlpMetrics(registry, resource("decode"), gone).start().stop()
    assert time.monotonic() - began < 6
