"""Metrics over OTLP: a registry's families, as they are at that moment, sent every few seconds.

The registry stays the one writer of each figure; Prometheus and OTLP are two ways to read it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Self

import structlog
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as OtelMetric
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from pdserve.telemetry import names

log = structlog.get_logger(__name__)

INTERVAL = 15.0  # seconds
FLUSH = 2.0  # seconds that the last export may take: a collector that is away must not hold up a service's end
_CUMULATIVE = AggregationTemporality.CUMULATIVE
_SCOPE = InstrumentationScope("pdserve")
_UNITS = {"seconds": "s", "bytes": "By"}


class OtlpMetrics:
    """Exports a registry every `interval` seconds, from a thread of its own, until `stop`.

    `exporter` replaces OTLP over gRPC to `endpoint` (tests). A turn that fails, by a collector that is down or by an
    error here, is logged and followed by the next one: totals are cumulative, so nothing but resolution is lost.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        resource: Resource,
        endpoint: str,
        interval: float = INTERVAL,
        exporter: MetricExporter | None = None,
    ) -> None:
        self._registry, self._resource, self._interval = registry, resource, interval
        self._exporter = exporter or _grpc_exporter(endpoint)
        self._began = time.time_ns()
        self._stop = threading.Event()
        self._healthy = True
        self._thread = threading.Thread(target=self._run, name="otlp metrics", daemon=True)

    def start(self) -> Self:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Export once more and end. Blocks for some seconds at most, so call it off the event loop."""
        self._stop.set()
        self._thread.join(FLUSH)
        self._exporter.shutdown()  # ends the wait between two tries, too
        self._thread.join(FLUSH)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._export()
        self._export()

    def _export(self) -> None:
        try:
            healthy, error = self._send(), None
        except Exception as broken:  # whatever a gauge's callback raises: it must not end the turns to come
            healthy, error = False, broken
        if healthy != self._healthy or error is not None:
            self._healthy = healthy
            log.warning("otlp_metrics", exporting=healthy, exc_info=error)

    def _send(self) -> bool:
        metrics = list(to_otel(self._registry.collect(), self._began, time.time_ns()))
        scope = ScopeMetrics(_SCOPE, metrics, "")
        data = MetricsData([ResourceMetrics(self._resource, [scope], "")])
        return self._exporter.export(data) is MetricExportResult.SUCCESS


def _grpc_exporter(endpoint: str) -> MetricExporter:
    # Imported only where it is used: it brings its own generated stubs, a third of a second.
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))


def to_otel(families: Iterable[Metric], began: int, now: int) -> Iterator[OtelMetric]:
    """Prometheus' families as OpenTelemetry's metrics, counted since `began` (wall-clock nanoseconds).

    A name keeps its words and loses `_total`, which OpenTelemetry says with the kind; those of the GenAI conventions
    are sent as these spell them. A label without a value is none, and a family without series is left out.
    """
    for family in families:
        if family.samples:
            yield _convert(family, began, now)


def _convert(family: Metric, began: int, now: int) -> OtelMetric:
    convention = names.GENAI_METRICS.get(family.name)
    spelling = names.GENAI_LABELS if convention else {}

    def attributes(sample: Sample) -> dict[str, str]:
        return {spelling.get(key, key): value for key, value in sample.labels.items() if key != "le" and value}

    unit = _UNITS.get(family.name.rpartition("_")[2], "1")
    data: Sum | Gauge | Histogram
    if family.type == "histogram":
        points = [_histogram(attributes(group[0]), group, began, now) for group in _by_labels(family.samples)]
        data = Histogram(points, _CUMULATIVE)
    else:
        samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        start = began if family.type == "counter" else 0
        numbers = [NumberDataPoint(attributes(sample), start, now, sample.value) for sample in samples]
        data = Sum(numbers, _CUMULATIVE, is_monotonic=True) if family.type == "counter" else Gauge(numbers)
    return OtelMetric(convention or family.name, family.documentation, unit, data)


def _by_labels(samples: Iterable[Sample]) -> Iterable[list[Sample]]:
    groups: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in samples:
        key = tuple(sorted((label, value) for label, value in sample.labels.items() if label != "le"))
        groups.setdefault(key, []).append(sample)
    return groups.values()


def _histogram(attributes: dict[str, str], samples: list[Sample], began: int, now: int) -> HistogramDataPoint:
    """One series. Prometheus counts upwards from bucket to bucket, OpenTelemetry each bucket for itself."""
    buckets = [(float(s.labels["le"]), int(s.value)) for s in samples if s.name.endswith("_bucket")]
    counts = [
        count - before for (_, count), before in zip(buckets, [0, *(count for _, count in buckets)], strict=False)
    ]
    return HistogramDataPoint(
        attributes=attributes,
        start_time_unix_nano=began,
        time_unix_nano=now,
        count=buckets[-1][1],  # of +Inf, the last one
        sum=next(s.value for s in samples if s.name.endswith("_sum")),
        bucket_counts=counts,
        explicit_bounds=[bound for bound, _ in buckets if math.isfinite(bound)],
        min=None,  # type: ignore[arg-type]  # not known, and optional on the wire
        max=None,  # type: ignore[arg-type]
    )
