"""Metrics: one registry a process, made where the process begins, read by Prometheus and by OTLP (see `export`).

Names are `pdserve_`, what it is, its unit in the plural (bytes, seconds), and `_total` for what only grows. A figure
has one writer. Totals that somebody else counts (an engine) are exported as last reported, by a collector that makes
its families when it is asked; so they never go back, and never count twice. Labels have few values: roles, states,
outcomes, served models, the fleet's workers; never what a client may choose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

__all__ = [
    "Collector",
    "CollectorRegistry",
    "Counter",
    "Histogram",
    "Labelled",
    "Metric",
    "count",
    "counter",
    "gauge",
    "histogram",
]

NAMESPACE = "pdserve"
Labelled = dict[tuple[str, ...], float]
"""Values by label values."""
Values = float | Mapping[tuple[str, ...], float]
"""The same, or one value without labels."""


class Collector(Protocol):
    """What a registry asks at each scrape, from a thread of its own: read only what is replaced as a whole."""

    def collect(self) -> Iterable[Metric]: ...


def counter(name: str, text: str, values: Values, labels: Sequence[str] = ()) -> Metric:
    """The counter pdserve_`name`, which must end with _total, at its present values."""
    _require_total(name)
    return _fill(CounterMetricFamily(f"{NAMESPACE}_{name}", text, labels=labels), values)


def gauge(name: str, text: str, values: Values, labels: Sequence[str] = ()) -> Metric:
    """The gauge pdserve_`name` at its present values."""
    return _fill(GaugeMetricFamily(f"{NAMESPACE}_{name}", text, labels=labels), values)


def histogram(
    registry: CollectorRegistry,
    name: str,
    text: str,
    buckets: Sequence[float],
    labels: Sequence[str] = (),
    namespace: str = NAMESPACE,
) -> Histogram:
    """A histogram pdserve_`name` in `registry`, for what is observed here and one by one."""
    return Histogram(name, text, labels, namespace=namespace, registry=registry, buckets=buckets)


def count(registry: CollectorRegistry, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
    """A counter pdserve_`name`, which must end with _total, in `registry`, for what is counted here and one by one."""
    _require_total(name)
    return Counter(name, text, labels, namespace=NAMESPACE, registry=registry)


def _require_total(name: str) -> None:
    if not name.endswith("_total"):
        raise ValueError(f"a counter's name ends with _total, {name} does not")


def _fill(family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
    for labels, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        family.add_metric(labels, value)
    return family
