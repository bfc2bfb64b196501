"""Metrics for Prometheus: one registry a process, made where the process begins, and served over HTTP.

Names are `pdserve_`, what it is, its unit in the plural (bytes, seconds), and `_total` for what only grows. A figure
has one writer. Totals that somebody else counts (an engine) are exported as last reported, by a collector that makes
its families when it is asked; so they never go back, and never count twice.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pdserve.core.errors import ConfigError

__all__ = ["Collector", "CollectorRegistry", "Histogram", "Metric", "MetricsServer", "counter", "gauge", "histogram"]

NAMESPACE = "pdserve"
# Values by label values, or one value without labels.
Values = float | Mapping[tuple[str, ...], float]


class Collector(Protocol):
    """What a registry asks at each scrape, from a thread of its own: read only what is replaced as a whole."""

    def collect(self) -> Iterable[Metric]: ...


def counter(name: str, text: str, values: Values, labels: Sequence[str] = ()) -> Metric:
    """The counter pdserve_`name`, which must end with _total, at its present values."""
    if not name.endswith("_total"):
        raise ValueError(f"a counter's name ends with _total, {name} does not")
    return _fill(CounterMetricFamily(f"{NAMESPACE}_{name}", text, labels=labels), values)


def gauge(name: str, text: str, values: Values, labels: Sequence[str] = ()) -> Metric:
    """The gauge pdserve_`name` at its present values."""
    return _fill(GaugeMetricFamily(f"{NAMESPACE}_{name}", text, labels=labels), values)


def histogram(registry: CollectorRegistry, name: str, text: str, buckets: Sequence[float]) -> Histogram:
    """A histogram pdserve_`name` in `registry`, for what is observed here and one by one."""
    return Histogram(name, text, namespace=NAMESPACE, registry=registry, buckets=buckets)


def _fill(family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
    for labels, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        family.add_metric(labels, value)
    return family


class MetricsServer:
    """Serves a registry at http://host:port/metrics while its scope is open, from threads of its own.

    `endpoint` is host:port once it is open. Raises ConfigError where it cannot listen.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """Port 0 is any free one."""
        self.endpoint = ""
        self._registry, self._host, self._port = registry, host, port
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None

    async def __aenter__(self) -> Self:
        host = self._host or "0.0.0.0"
        try:
            # Off the event loop: the standard library looks the host's name up, which may take seconds.
            server, thread = await asyncio.to_thread(start_http_server, self._port, addr=host, registry=self._registry)
        except OSError as error:
            raise ConfigError(f"cannot serve metrics at {host}:{self._port}: {error.strerror or error}") from error
        self._server, self._thread = server, thread
        self.endpoint = f"[{host}]:{server.server_port}" if ":" in host else f"{host}:{server.server_port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None and self._thread is not None
        await asyncio.to_thread(self._server.shutdown)
        self._thread.join()
        self._server.server_close()
