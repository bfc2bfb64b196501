"""A registry arrives at a real OTLP receiver as it is: kinds, units, labels, buckets, and the conventions' names."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE, Metric
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from prometheus_client.core import Metric as PrometheusMetric
from structlog.testing import capture_logs

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


class Flaky(MetricExporter):
    """Keeps what it is sent, and raises while it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.raises = False
        self.turns = 0
        self.sent: list[MetricsData] = []
        self.turned = threading.Condition()

    def export(self, metrics_data: MetricsData, timeout_millis: float = 0, **_: Any) -> MetricExportResult:
        with self.turned:
            self.turn()
            if self.raises:
                raise OSError("a bug of the exporter's")
            self.sent.append(metrics_data)
        return MetricExportResult.SUCCESS

    def turn(self) -> None:
        with self.turned:
            self.turns += 1
            self.turned.notify_all()

    def wait(self, until: Callable[[], bool]) -> None:
        with self.turned:
            assert self.turned.wait_for(until, 10)

    def shutdown(self, timeout_millis: float = 0, **_: Any) -> None: ...
    def force_flush(self, timeout_millis: float = 0) -> bool:
        return True


class Broken:
    """A collector that raises, or gives what cannot be converted, while it is told to."""

    def __init__(self, exporter: Flaky) -> None:
        self.exporter, self.kind = exporter, ""

    def collect(self) -> Iterable[object]:
        if self.kind:
            self.exporter.turn()
        if self.kind == "collector":
            raise ValueError("a bug of the collector's")
        if self.kind == "conversion":
            family = PrometheusMetric("half_seconds", "A histogram without buckets.", "histogram")
            family.add_sample("half_seconds_sum", {}, 1.0)
            return [family]
        return []


@pytest.mark.parametrize("kind", ["collector", "conversion", "exporter"])
def test_a_turn_that_breaks_is_told_and_followed_by_the_next(kind: str) -> None:
    exporter, registry = Flaky(), CollectorRegistry()
    broken = Broken(exporter)
    registry.register(broken)  # type: ignore[arg-type]
    total = count(registry, "things_total", "Things.")
    with capture_logs() as logs:
        metrics = OtlpMetrics(registry, resource("decode"), "", interval=0.01, exporter=exporter).start()
        exporter.wait(lambda: len(exporter.sent) >= 1)
        with exporter.turned:
            exporter.raises, broken.kind = kind == "exporter", kind
            turns = exporter.turns
        exporter.wait(lambda: exporter.turns >= turns + 4)
        assert metrics._thread.is_alive()
        total.inc(5)
        with exporter.turned:
            exporter.raises, broken.kind = False, ""
            sent = len(exporter.sent)
        exporter.wait(lambda: len(exporter.sent) >= sent + 2)
        metrics.stop()
    [scope] = exporter.sent[-1].resource_metrics[0].scope_metrics
    assert [(metric.name, metric.data.data_points[0].value) for metric in scope.metrics] == [("pdserve_things", 5)]  # type: ignore[union-attr]
    told = [(entry["exporting"], type(entry["exc_info"])) for entry in logs if entry["event"] == "otlp_metrics"]
    assert len(told) >= 3 and told[-1] == (True, type(None)) and [exporting for exporting, _ in told].count(True) == 1
    assert {error for _, error in told[:-1]} <= {ValueError, IndexError, OSError}
