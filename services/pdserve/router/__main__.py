"""`python -m pdserve.router`: one router process."""

from __future__ import annotations

import asyncio
import gc
import sys
from functools import partial

import structlog
import uvloop

from pdserve.core.errors import PdserveError
from pdserve.launch.models import resolve_model
from pdserve.router.callers import Callers
from pdserve.router.config import RouterSettings
from pdserve.router.fleet import Fleet
from pdserve.router.links import Links
from pdserve.router.metrics import RouterMetrics
from pdserve.router.models import Models, load_models, model_sources
from pdserve.router.service import SERVICE, InferenceService
from pdserve.router.worker import lease_channel
from pdserve.rpc.access import access_of
from pdserve.rpc.channel import PUBLIC_MESSAGE_BYTES
from pdserve.rpc.server import GrpcServer, warn_where_open
from pdserve.telemetry.export import Metrics
from pdserve.telemetry.logs import setup_logs
from pdserve.telemetry.tracing import setup_tracing
from pdserve.v1 import inference_pb2_grpc

log = structlog.get_logger(__name__)


async def serve(settings: RouterSettings) -> None:
    """Run a router until it is told to stop. Raises PdserveError when it cannot."""
    access = access_of(settings.internal_secret_file, settings.caller_tls)
    metrics = RouterMetrics(settings.slo)
    callers = Callers(settings.api_keys_file, metrics)
    service = InferenceService(settings, [metrics], callers)
    check = callers.check if settings.api_keys_file else None
    if check is None:
        warn_where_open(settings, "api-keys-file")
    add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
    export = Metrics(metrics.registry, "router")
    async with GrpcServer(settings, [(add, service, SERVICE)], export, PUBLIC_MESSAGE_BYTES, check) as server:
        folders = {}
        for source in model_sources(settings.model):
            folders[source] = await resolve_model(
                source,
                revision=settings.revision,
                progress=lambda line: server.launcher.report("progress", stage=line),
            )
        models = await asyncio.to_thread(load_models, settings.model, folders.__getitem__)
        fleet = Fleet(settings, models, dial=partial(lease_channel, access=access))
        service.start(models, fleet)
        metrics.start(models, fleet, service.waiting)
        # What is there by now stays: a full run of the collector, which holds everything up, need not walk over it.
        gc.collect()
        gc.freeze()
        server.on_drain.append(service.drain)
        readiness = Readiness(server, fleet, models)
        async with fleet, Links(fleet):
            task = asyncio.create_task(readiness.run(), name="readiness")
            try:
                await server.run_until_stopped()
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


class Readiness:
    """Tells health checks and the launcher whether requests can be served.

    Ready for the first time when every model is, and every endpoint has answered or was given up; from then on while
    any model is, so that one model's outage does not take the others out of the load balancer.
    """

    def __init__(self, server: GrpcServer, fleet: Fleet, models: Models) -> None:
        self._server, self._fleet, self._models = server, fleet, models
        self._changed = asyncio.Event()
        fleet.on_membership.append(self._changed.set)

    async def run(self) -> None:
        """For ever; the owner cancels it."""
        ready, was_ready = False, False
        while True:
            self._changed.clear()
            served = [self._fleet.serves(model) for model in self._models]
            now = any(served) if was_ready else all(served) and not self._fleet.unanswered
            if now != ready:
                ready, was_ready = now, was_ready or now
                log.info("readiness", ready=ready)
                await self._server.set_ready(ready)
            await self._changed.wait()


def main(argv: list[str] | None = None) -> int:
    """Run the service; returns the exit status."""
    settings = RouterSettings.load(argv)
    setup_logs("router", settings.log_level)
    stop_tracing = setup_tracing("router", settings.otlp_endpoint, ring=settings.trace_ring)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    except PdserveError as error:
        log.error("router_failed", error=str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        stop_tracing()
    return 0


if __name__ == "__main__":
    sys.exit(main())
