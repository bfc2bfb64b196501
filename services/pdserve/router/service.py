"""InferenceService: the public API. Requests come in here, and every refusal leaves typed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio
import structlog

from pdserve.core.errors import PdserveError, Unavailable
from pdserve.router.admission import Door, stated_targets
from pdserve.router.callers import Caller, Callers
from pdserve.router.codec_service import detokenize, tokenize
from pdserve.router.config import RouterSettings
from pdserve.router.dispatch import Dispatcher
from pdserve.router.fleet import Fleet
from pdserve.router.measure import Measure, promised
from pdserve.router.meter import Meter
from pdserve.router.models import ModelFacts, Models, ServedModel
from pdserve.router.multiplex import Lane, Multiplex
from pdserve.router.recent import RecentRequests, Record
from pdserve.router.request import RequestRun
from pdserve.router.stats import WINDOW, RecentStats
from pdserve.router.traces import gather
from pdserve.router.validate import MAX_MODEL_NAME, MAX_REQUEST_ID, resolve, resolve_request_id
from pdserve.router.waiting import Wishes
from pdserve.router.worker import Worker
from pdserve.rpc.api_keys import shown_key
from pdserve.rpc.errors import DeadlineExceeded, RpcError, abort, status_code
from pdserve.rpc.guard import texts
from pdserve.rpc.writing import PatientContext, write_whole
from pdserve.telemetry import names
from pdserve.telemetry.logs import log_request
from pdserve.telemetry.tracing import TRACEPARENT, bounded_traceparent, start_span, traceparent_of
from pdserve.v1 import inference_pb2, inference_pb2_grpc, stats_pb2

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
SERVICE = "pdserve.v1.InferenceService"
DEFAULT_TRACES = 20
# Kept of a deadline to say RESOURCE_EXHAUSTED in: after it the client would only see its own DEADLINE_EXCEEDED.
_ANSWER_SHARE, _ANSWER_MAX = 0.1, 0.1


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Serves once `start` was called; UNAVAILABLE before that and while draining."""

    def __init__(self, settings: RouterSettings, meters: Sequence[Meter] = (), callers: Callers | None = None) -> None:
        """Each of `meters` hears of every request. `callers` None: keys are not asked for."""
        self._settings = settings
        self._callers = callers or Callers(None)
        self._stats = RecentStats()
        self._meters = (*meters, self._stats)
        self._recent = RecentRequests(settings.trace_ring)
        self._models = Models(())
        self._fleet: Fleet | None = None
        self._dispatcher: Dispatcher | None = None
        self._door: Door | None = None
        self._draining = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self, models: Models, fleet: Fleet) -> None:
        """Serve `models` with `fleet`, which outlives this service's requests."""
        self._models, self._fleet = models, fleet
        dispatcher = self._dispatcher = Dispatcher(fleet, self._settings.max_queue, self._settings.rules)
        self._door = Door(self._settings, fleet, dispatcher.ahead, dispatcher.expected)

    def waiting(self, model: str) -> int:
        """How many requests for `model` wait for a worker."""
        return self._dispatcher.waiting(self._models.get(model)) if self._dispatcher else 0

    async def drain(self) -> None:
        """Refuse new requests and wait for the running ones."""
        self._draining = True
        await self._idle.wait()

    # A coroutine that writes, not a generator: a cancel then arrives where the work is, and scopes close at once.
    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        await self._serve(request, PatientContext(context))

    async def _serve(self, request: inference_pb2.GenerateRequest, context: PatientContext | Lane) -> None:
        """One request from its beginning to its end, which `context` is told."""
        metadata = texts(context.invocation_metadata())
        caller = await self._caller(context, metadata)
        refusal: PdserveError | None = None
        self._running += 1
        self._idle.clear()
        if len(request.model) > MAX_MODEL_NAME:  # before it stands in spans and logs
            request.model = request.model[:MAX_MODEL_NAME] + "..."
        chat = request.WhichOneof("prompt") == "chat"
        operation = names.OPERATION_CHAT if chat else names.OPERATION_TEXT_COMPLETION
        parent = bounded_traceparent(metadata.get(TRACEPARENT, ""))
        name = f"{operation} {request.model}".rstrip()
        span = start_span(name, parent, {names.OPERATION_NAME: operation, names.PROVIDER_NAME: names.PROVIDER})
        measure = Measure(self._meters, operation)
        record = Record(span, name, parent, measure)
        try:
            await self._generate(request, context, caller, metadata, traceparent_of(span) or parent, measure, record)
        except PdserveError as error:
            measure.failed(status_code(error))
            record.failed(status_code(error).name, error)
            # Refused before it was named, it is what its caller calls it, unchecked.
            request_id = (record.request_id or request.request_id or metadata.get("x-request-id", ""))[:MAX_REQUEST_ID]
            log.info("request_failed", request_id=request_id, code=status_code(error).name, error=str(error))
            refusal = error
        except asyncio.CancelledError:
            measure.cancelled()
            record.cancelled()
            raise
        except Exception as error:
            measure.failed(grpc.StatusCode.INTERNAL)
            record.failed(grpc.StatusCode.INTERNAL.name, error)
            raise
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()
        if refusal is not None:  # last: a client that does not read is told when it does, and nobody waits for that
            await abort(context, refusal)

    async def Multiplex(  # type: ignore[override]
        self, request_iterator: AsyncIterator[inference_pb2.MultiplexRequest], context: Context
    ) -> None:
        try:
            key = shown_key(texts(context.invocation_metadata()))
            await Multiplex(self._serve, partial(write_whole, context), key).run(request_iterator)
        except PdserveError as error:
            await abort(context, error)

    async def _generate(
        self,
        request: inference_pb2.GenerateRequest,
        context: PatientContext | Lane,
        caller: Caller,
        metadata: dict[str, str],
        traceparent: str,
        measure: Measure,
        record: Record,
    ) -> None:
        fleet, dispatcher, door = self._fleet, self._dispatcher, self._door
        if fleet is None or dispatcher is None or door is None or self._draining:
            raise Unavailable("this router is draining" if self._draining else "this router is starting")
        model = caller.model(request.model, self._models)
        wishes = Wishes(
            tenant=caller.tenant(metadata),
            session=request.session_id,
            targets=promised(request.slo, self._settings.slo),
            stated=stated_targets(request.slo, self._settings),
            key=caller.key,
        )
        measure.started(model.name, wishes.targets)
        request_id = resolve_request_id(request.request_id or metadata.get("x-request-id", ""))
        record.named(request_id, model.name, wishes.tenant)
        self._recent.add(record)
        loop = asyncio.get_running_loop()
        remaining = context.time_remaining()
        seconds = self._settings.max_request_seconds if remaining is None else remaining
        deadline = loop.time() + seconds
        facts = fleet.facts(model)
        if facts is None:
            raise Unavailable(f"no worker of {model.name} has answered yet")
        with log_request(request_id), door.entered(wishes, measure) as visit:
            try:
                async with asyncio.timeout_at(deadline):
                    resolved = await resolve(request, model, facts, request_id, self._settings.max_priority)
                    await visit.admit(resolved, deadline)
                    run = RequestRun(
                        resolved,
                        fleet,
                        dispatcher,
                        context.write,
                        deadline=deadline,
                        queue_deadline=deadline - min(_ANSWER_MAX, _ANSWER_SHARE * seconds),
                        unread_seconds=self._settings.unread_seconds,
                        max_replays=self._settings.max_replays,
                        max_worker_deaths=self._settings.max_worker_deaths,
                        leave_rule=self._settings.rules.leave_rule,
                        measure=measure,
                        traceparent=traceparent,
                        wishes=wishes,
                    )
                    try:
                        finish = await run.run()
                    except asyncio.CancelledError:
                        # Many clients leave with the finish, and don't wait for the stream's own end.
                        if run.finish is not None and await context.written():
                            _answered(run.finish, measure, record)
                        raise
            except TimeoutError:
                raise DeadlineExceeded(f"the request took longer than {seconds:.3g} s") from None
            _answered(finish, measure, record)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        caller = await self._caller(context)
        fleet, models = self._fleet, []
        for model in self._models:
            shown = fleet and caller.may_use(model.name) and fleet.serves(model)
            facts = fleet.facts(model) if fleet and shown else None
            if facts is not None:
                models.append(
                    inference_pb2.Model(name=model.name, max_model_len=facts.max_model_len, vocab_size=facts.vocab_size)
                )
        return inference_pb2.ListModelsResponse(models=models)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        try:
            return await tokenize(request, *self._known(await self._caller(context), request.model))
        except PdserveError as error:
            await abort(context, error)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        try:
            return await detokenize(request, *self._known(await self._caller(context), request.model))
        except PdserveError as error:
            await abort(context, error)

    async def _caller(
        self, context: Context | PatientContext | Lane, metadata: Mapping[str, str] | None = None
    ) -> Caller:
        """Who makes this call; one of nobody's ends here."""
        try:
            return await self._callers.of(texts(context.invocation_metadata()) if metadata is None else metadata)
        except PdserveError as error:
            await abort(context, error)

    def _known(self, caller: Caller, name: str) -> tuple[ServedModel, ModelFacts]:
        """A model and its limits. Raises PermissionDenied, UnknownModel, and Unavailable before any of its workers has
        answered."""
        model = caller.model(name, self._models) if self._fleet else None
        if model is None or self._fleet is None:
            raise Unavailable("this router is starting")
        facts = self._fleet.facts(model)
        if facts is None:
            raise Unavailable(f"no worker of {model.name} has answered yet")
        return model, facts

    async def GetStats(self, request: stats_pb2.GetStatsRequest, context: Context) -> stats_pb2.GetStatsResponse:
        caller, targets = await self._caller(context), self._settings.slo
        response = stats_pb2.GetStatsResponse(
            window_seconds=WINDOW,
            ttft_target_ms=targets.ttft * 1e3,
            itl_target_ms=targets.itl * 1e3,
            itl_target_percentile=targets.itl_percentile,
        )
        if self._fleet is not None:
            response.router_id = self._fleet.router_id
            usable = (model.name for model in self._models if caller.may_use(model.name))
            response.models.extend(self._stats.told(name, self.waiting(name)) for name in usable)
        return response

    async def ListTraces(
        self, request: inference_pb2.ListTracesRequest, context: Context
    ) -> inference_pb2.ListTracesResponse:
        caller = await self._caller(context)
        records = self._recent.latest(request.limit or DEFAULT_TRACES, caller.sees)
        return inference_pb2.ListTracesResponse(requests=[record.summary() for record in records])

    async def GetTrace(
        self, request: inference_pb2.GetTraceRequest, context: Context
    ) -> inference_pb2.GetTraceResponse:
        try:
            record = self._remembered(await self._caller(context), request.request_id)
            if self._fleet is None:
                raise Unavailable("this router is starting")
            return await gather(record, self._fleet)
        except PdserveError as error:
            await abort(context, error)

    async def GetDecisions(
        self, request: inference_pb2.GetDecisionsRequest, context: Context
    ) -> inference_pb2.GetDecisionsResponse:
        try:
            record = self._remembered(await self._caller(context), request.request_id)
            return inference_pb2.GetDecisionsResponse(
                request=record.summary(), decisions=record.decisions.told(), dropped=record.decisions.dropped
            )
        except PdserveError as error:
            await abort(context, error)

    def _remembered(self, caller: Caller, request_id: str) -> Record:
        """A recent request. Raises UnknownRequest, also for another tenant's, and FAILED_PRECONDITION where none is
        kept."""
        if not self._recent.size:
            raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, "this router keeps no traces (--trace-ring 0)")
        return self._recent.get(request_id, caller.sees)

    async def GetFleet(
        self, request: inference_pb2.GetFleetRequest, context: Context
    ) -> inference_pb2.GetFleetResponse:
        caller = await self._caller(context)
        workers = [worker for worker in self._fleet.workers if self._shown(caller, worker)] if self._fleet else []
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

    def _shown(self, caller: Caller, worker: Worker) -> bool:
        """Whether a worker is of a model that the caller may use, or of no served one, as a prefix cache is."""
        model = self._models.announced_as(worker.snapshot.model) if worker.snapshot else None
        return model is None or caller.may_use(model.name)


def _answered(finish: inference_pb2.Finish, measure: Measure, record: Record) -> None:
    """The client has the whole answer."""
    measure.answered(finish)
    record.done(finish)
    usage = finish.usage
    log.info(
        "request_done",
        reason=inference_pb2.FinishReason.Name(finish.reason),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        replays=usage.replays,
        prefill_worker=usage.prefill_worker,
        decode_worker=usage.decode_worker,
    )
