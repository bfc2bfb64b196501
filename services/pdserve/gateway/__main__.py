"""`python -m pdserve.gateway`: OpenAI's HTTP API in front of routers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import structlog
import uvloop

from pdserve.core.errors import PdserveError
from pdserve.gateway.app import create_app
from pdserve.gateway.config import GatewaySettings
from pdserve.gateway.metrics import GatewayMetrics
from pdserve.gateway.routers import Routers
from pdserve.gateway.server import HttpServer
from pdserve.telemetry.export import Metrics, export_metrics
from pdserve.telemetry.logs import setup_logs
from pdserve.telemetry.tracing import setup_tracing

log = structlog.get_logger(__name__)


async def serve(settings: GatewaySettings) -> None:
    """Run a gateway until it is told to stop. Raises PdserveError when it cannot."""
    metrics = GatewayMetrics()
    export = export_metrics(Metrics(metrics.registry, "gateway"), settings)
    async with HttpServer(settings) as server, export as url, Routers(settings.router, settings.caller_tls) as routers:
        app = create_app(routers, settings, metrics, lambda: server.draining)
        ready = asyncio.create_task(_tell_ready(server, routers, url), name="readiness")
        try:
            await server.serve(app)
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)


async def _tell_ready(server: HttpServer, routers: Routers, metrics: str | None) -> None:
    await routers.wait_serving()
    own = f"{server.scheme}://{server.endpoint}/metrics"
    log.info("ready", endpoint=server.endpoint, metrics=metrics or own)
    server.ready(metrics=metrics or own)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service; returns the exit status."""
    settings = GatewaySettings.load(argv)
    setup_logs("gateway", settings.log_level)
    stop_tracing = setup_tracing("gateway", settings.otlp_endpoint, ring=settings.trace_ring)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    except PdserveError as error:
        log.error("gateway_failed", error=str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        stop_tracing()
    return 0


if __name__ == "__main__":
    sys.exit(main())
