"""InferenceService: the public API. Requests come in here, and every refusal leaves typed."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import structlog

from pdserve.core.errors import PdserveError, Unavailable
from pdserve.router.config import RouterSettings
from pdserve.router.dispatch import Dispatcher
from pdserve.router.fleet import Fleet
from pdserve.router.models import Models
from pdserve.router.request import RequestRun
from pdserve.router.stages import Timeline
from pdserve.router.validate import MAX_MODEL_NAME, resolve, resolve_request_id
from pdserve.rpc.errors import DeadlineExceeded, abort, status_code
from pdserve.telemetry import names
from pdserve.telemetry.logs import log_request
from pdserve.telemetry.tracing import TRACEPARENT, Span, start_span, traceparent_of
from pdserve.v1 import inference_pb2, inference_pb2_grpc

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
SERVICE = "pdserve.v1.InferenceService"
# Kept of a deadline to say RESOURCE_EXHAUSTED in: after it the client would only see its own DEADLINE_EXCEEDED.
_ANSWER_SHARE, _ANSWER_MAX = 0.1, 0.1


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Serves once `start` was called; UNAVAILABLE before that and while draining."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._models = Models(())
        self._fleet: Fleet | None = None
        self._dispatcher: Dispatcher | None = None
        self._draining = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self, models: Models, fleet: Fleet) -> None:
        """Serve `models` with `fleet`, which outlives this service's requests."""
        self._models, self._fleet = models, fleet
        self._dispatcher = Dispatcher(fleet, self._settings.max_queue)

    def waiting(self, model: str) -> int:
        """How many requests for `model` wait for a worker."""
        return self._dispatcher.waiting(self._models.get(model)) if self._dispatcher else 0

    async def drain(self) -> None:
        """Refuse new requests and wait for the running ones."""
        self._draining = True
        await self._idle.wait()

    # A coroutine that writes, not a generator: a cancel then arrives where the work is, and scopes close at once.
    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        self._running += 1
        self._idle.clear()
        if len(request.model) > MAX_MODEL_NAME:  # before it stands in spans and logs
            request.model = request.model[:MAX_MODEL_NAME] + "..."
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        chat = request.WhichOneof("prompt") == "chat"
        operation = names.OPERATION_CHAT if chat else names.OPERATION_TEXT_COMPLETION
        span = start_span(
            f"{operation} {request.model}".rstrip(),
            metadata.get(TRACEPARENT, ""),
            {names.OPERATION_NAME: operation, names.PROVIDER_NAME: names.PROVIDER},
        )
        try:
            await self._generate(request, context, metadata, span)
        except PdserveError as error:
            span.set_attribute(names.ERROR_TYPE, type(error).__name__)
            log.info("request_failed", code=status_code(error).name, error=str(error))
            await abort(context, error)
        except asyncio.CancelledError:
            span.set_attribute(names.ERROR_TYPE, "cancelled")
            raise
        finally:
            span.end()
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _generate(
        self, request: inference_pb2.GenerateRequest, context: Context, metadata: dict[str, str], span: Span
    ) -> None:
        timeline = Timeline()
        fleet, dispatcher = self._fleet, self._dispatcher
        if fleet is None or dispatcher is None or self._draining:
            raise Unavailable("this router is draining" if self._draining else "this router is starting")
        model = self._models.get(request.model)
        request_id = resolve_request_id(request.request_id or metadata.get("x-request-id", ""))
        loop = asyncio.get_running_loop()
        remaining = context.time_remaining()
        seconds = self._settings.max_request_seconds if remaining is None else remaining
        deadline = loop.time() + seconds
        facts = fleet.facts(model)
        if facts is None:
            raise Unavailable(f"no worker of {model.name} has answered yet")
        span.set_attribute(names.REQUEST_MODEL, model.name)
        span.set_attribute(names.REQUEST_ID, request_id)
        with log_request(request_id):
            try:
                async with asyncio.timeout_at(deadline):
                    resolved = await resolve(request, model, facts, request_id)
                    run = RequestRun(
                        resolved,
                        fleet,
                        dispatcher,
                        context.write,
                        deadline=deadline,
                        queue_deadline=deadline - min(_ANSWER_MAX, _ANSWER_SHARE * seconds),
                        max_replays=self._settings.max_replays,
                        timeline=timeline,
                        traceparent=traceparent_of(span) or metadata.get(TRACEPARENT, ""),
                    )
                    finish = await run.run()
            except TimeoutError:
                raise DeadlineExceeded(f"the request took longer than {seconds:.3g} s") from None
            timeline.record(traceparent_of(span), timeline.now())
            _describe(span, finish)
            log.info(
                "request_done",
                reason=inference_pb2.FinishReason.Name(finish.reason),
                prompt_tokens=finish.usage.prompt_tokens,
                completion_tokens=finish.usage.completion_tokens,
                cached_tokens=finish.usage.cached_tokens,
                replays=finish.usage.replays,
                prefill_worker=finish.usage.prefill_worker,
                decode_worker=finish.usage.decode_worker,
            )

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        fleet, models = self._fleet, []
        for model in self._models:
            facts = fleet.facts(model) if fleet and fleet.serves(model) else None
            if facts is not None:
                models.append(
                    inference_pb2.Model(name=model.name, max_model_len=facts.max_model_len, vocab_size=facts.vocab_size)
                )
        return inference_pb2.ListModelsResponse(models=models)

    async def GetFleet(
        self, request: inference_pb2.GetFleetRequest, context: Context
    ) -> inference_pb2.GetFleetResponse:
        workers = self._fleet.workers if self._fleet else ()
        return inference_pb2.GetFleetResponse(
            workers=[
                inference_pb2.FleetWorker(
                    endpoint=worker.endpoint,
                    connected=worker.connected,
                    snapshot=worker.snapshot,
                    load=worker.load,
                    outstanding_tokens=worker.ledger.outstanding_tokens,
                    links=worker.links,
                )
                for worker in workers
            ]
        )


def _describe(span: Span, finish: inference_pb2.Finish) -> None:
    usage = finish.usage
    span.set_attribute(names.USAGE_INPUT_TOKENS, usage.prompt_tokens)
    span.set_attribute(names.USAGE_OUTPUT_TOKENS, usage.completion_tokens)
    span.set_attribute(names.USAGE_CACHE_READ_TOKENS, usage.cached_tokens)
    reason = "stop" if finish.reason == inference_pb2.FINISH_REASON_STOP else "length"
    span.set_attribute(names.RESPONSE_FINISH_REASONS, [reason])
    span.set_attribute(names.PREFILL_WORKER, usage.prefill_worker)
    span.set_attribute(names.DECODE_WORKER, usage.decode_worker)
    span.set_attribute(names.KV_BYTES, usage.kv_transfer_bytes)
    span.set_attribute(names.REPLAYS, usage.replays)
