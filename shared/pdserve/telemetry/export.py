"""A process' metrics on their way out: a Prometheus endpoint where a port was given, OTLP where an endpoint was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry

from pdserve.telemetry.metrics_server import PATH, MetricsServer
from pdserve.telemetry.otlp_metrics import OtlpMetrics
from pdserve.telemetry.resource import resource


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a service has to export: its registry, and who it is."""

    registry: CollectorRegistry
    service: str
    instance: str = ""


class Settings(Protocol):
    """Where metrics go; see rpc.settings.ServiceSettings."""

    @property
    def host(self) -> str: ...
    @property
    def metrics_port(self) -> int | None: ...
    @property
    def otlp_endpoint(self) -> str | None: ...


@asynccontextmanager
async def export_metrics(metrics: Metrics, settings: Settings) -> AsyncIterator[str | None]:
    """Export while the scope is open; yields the URL to scrape, or None where no port is set. Raises ConfigError."""
    async with AsyncExitStack() as scope:
        url = None
        if settings.metrics_port is not None:
            server = await scope.enter_async_context(
                MetricsServer(metrics.registry, settings.host, settings.metrics_port)
            )
            url = f"http://{server.endpoint}{PATH}"
        if settings.otlp_endpoint is not None:
            about = resource(metrics.service, metrics.instance)
            exporter = await asyncio.to_thread(OtlpMetrics, metrics.registry, about, settings.otlp_endpoint)
            exporter.start()
            scope.push_async_callback(asyncio.to_thread, exporter.stop)
        yield url
