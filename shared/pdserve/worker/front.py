"""The front of a worker: what prefill and decode share beside their own gRPC service."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Protocol

import grpc.aio
import structlog
from msgspec.structs import replace

from pdserve.core.errors import InvalidRequest, PdserveError, Unavailable
from pdserve.core.sequence import SequenceSpec
from pdserve.rpc.access import access_of
from pdserve.rpc.channel import connect
from pdserve.rpc.convert import layout_to_proto
from pdserve.rpc.convert_link import Hello
from pdserve.rpc.server import GrpcServer, Service, ServiceFailed, internal_check
from pdserve.rpc.versions import PROTOCOL_MAX, PROTOCOL_MIN, our_versions, software_version
from pdserve.telemetry.export import Metrics
from pdserve.telemetry.logs import setup_logs
from pdserve.telemetry.tracing import setup_tracing
from pdserve.transfer.messages import PULL_SUFFIX, LinkReport, TransferReport
from pdserve.v1 import kv_pb2_grpc, worker_pb2, worker_pb2_grpc
from pdserve.worker.config import WorkerSettings
from pdserve.worker.engine_client import EngineClient
from pdserve.worker.engine_pulse import EnginePulse
from pdserve.worker.links import Links
from pdserve.worker.messages import (
    AlreadyReady,
    AttemptFailed,
    BlocksExported,
    Detached,
    EngineStarted,
    HandOffFailed,
    IntegrityReport,
    KvCommitted,
    Pong,
    Rearmed,
    ReservedPages,
    StartPrefill,
    StepDone,
    TicketMessage,
    TicketReady,
)
from pdserve.worker.metrics import WorkerMetrics
from pdserve.worker.prefix_client import PrefixClient
from pdserve.worker.sent_prompts import SentPrompts
from pdserve.worker.service import WorkerServicer
from pdserve.worker.watch import WatchBoard, links_to_proto, load_to_proto

log = structlog.get_logger(__name__)

MAX_TICKET = 256
_ROLES = {"prefill": worker_pb2.ROLE_PREFILL, "decode": worker_pb2.ROLE_DECODE}


class RoleService(Protocol):
    """What prefill and decode each add. Calls come on the event loop and must not block."""

    def on_step(self, step: StepDone) -> None: ...
    def on_message(self, message: TicketMessage) -> None: ...
    def draining(self, seconds: float) -> None:
        """This worker stops in that time, or as soon as no ticket is left."""

    async def finished(self) -> None:
        """Wait until no ticket is left."""

    def close(self) -> None:
        """End the streams that would otherwise stay open."""


class WorkerFront:
    """Engine, links, watch board, metrics and prefix client of one worker, and the loop that hands messages on.

    Raises ConfigError for a secret or files of TLS that cannot be read.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        role: str,
        worker_id: str,
        *,
        incarnation: str = "",
        engine: EngineClient | None = None,
        dial: Callable[[str], grpc.aio.Channel] | None = None,
    ) -> None:
        """`incarnation` tells this process from others of its id; empty: it is drawn."""
        self.settings, self.role, self.worker_id = settings, role, worker_id
        self.access = access_of(settings.internal_secret_file, settings.caller_tls)
        self.incarnation = incarnation or secrets.token_hex(8)
        self.node = socket.gethostname()
        self.engine = engine or EngineClient(settings.for_engine(role))
        self.board = WatchBoard()
        self.metrics = WorkerMetrics(self.worker_id, role, settings.model_name)
        self.links = Links(self.engine.send_link, self._on_report, dial or partial(connect, access=self.access))
        self.prefix: PrefixClient | None = None
        self.started: EngineStarted | None = None
        self._sent = SentPrompts()
        self._pulse = EnginePulse(settings.engine_stall_seconds)
        self._server: GrpcServer | None = None
        self._service: RoleService | None = None

    def services(self) -> list[Service]:
        """The gRPC services that every worker has."""
        watch = WorkerServicer(self.board, self.leave, self.links)
        return [
            (worker_pb2_grpc.add_WorkerServiceServicer_to_server, watch, "pdserve.v1.WorkerService"),
            (kv_pb2_grpc.add_LinkServiceServicer_to_server, self.links, "pdserve.v1.LinkService"),
        ]

    @property
    def draining(self) -> bool:
        """Whether it is about to stop."""
        return self.board.draining

    def require_open(self) -> None:
        """Raise Unavailable where no new work is taken: before the start, and once draining."""
        if self.started is None:
            raise Unavailable(f"{self.worker_id} is starting")
        if self.board.draining:
            raise Unavailable(f"{self.worker_id} is draining")
        if self.board.suspended:
            raise Unavailable(self.board.suspended)

    def check_ticket(self, ticket: str) -> None:
        """Raise InvalidRequest for what cannot name a ticket."""
        if not ticket or len(ticket) > MAX_TICKET or ticket.endswith(PULL_SUFFIX):
            raise InvalidRequest("ticket", f"must be 1 to {MAX_TICKET} characters and not end in {PULL_SUFFIX}")

    def check(self, spec: SequenceSpec) -> None:
        """Raise InvalidRequest for a sequence that this worker can never take."""
        assert self.started is not None
        if len(spec.token_ids) >= self.started.max_model_len:
            raise InvalidRequest(
                "token_ids", f"{len(spec.token_ids)} tokens leave no room in {self.started.max_model_len}"
            )
        if max(spec.token_ids) >= self.started.vocab_size:
            raise InvalidRequest("token_ids", f"an id is outside the vocabulary of {self.started.vocab_size}")
        if max(spec.eos_token_ids, default=0) >= self.started.vocab_size:
            raise InvalidRequest(
                "eos_token_ids", f"an id is outside the vocabulary of {self.started.vocab_size}: {spec.eos_token_ids}"
            )
        spec.params.check(self.started.vocab_size)

    def start_prefill(self, message: StartPrefill) -> None:
        """Send a prompt to the engine. From now on this worker's load, as it is told, has it."""
        self.engine.send(message)
        self._sent.add(len(message.spec.token_ids), bounded=message.spec.itl_target is not None)
        if self.metrics.load is not None:
            self.board.publish(load_to_proto(self._sent.with_sent(self.metrics.load)))

    async def leave(self) -> None:
        """Leave the view: no new work from now on; what runs goes on."""
        if not self.board.draining:
            log.info("leaving", worker_id=self.worker_id)
            self.board.set_draining()
            if self._server is not None:
                await self._server.set_ready(False)

    async def run(self, server: GrpcServer, service: RoleService) -> None:
        """Start the engine and serve. Returns only by cancellation; any end of the engine goes to `server.fail`."""
        self._server, self._service = server, service
        try:
            async with AsyncExitStack() as scope:
                await scope.enter_async_context(self.engine)
                await self._start(server, scope)
                async with asyncio.TaskGroup() as pumps:
                    pumps.create_task(self._pump(service), name="engine messages")
                    pumps.create_task(self._pump_links(), name="link messages")
                    pumps.create_task(self._pulse.watch(self.engine.send, self._engine_stalled), name="engine pulse")
        except* PdserveError as group:
            server.fail(str(_first(group)))
        except* Exception as group:
            log.exception("front_failed")
            server.fail(repr(_first(group)))

    async def _start(self, server: GrpcServer, scope: AsyncExitStack) -> None:
        started = await self.engine.start(
            lambda stage, done: server.launcher.report("progress", stage=stage, done=done)
        )
        settings = self.settings
        if settings.prefix_cache:
            client = PrefixClient(settings.prefix_cache, started.layout, self.engine, self.board.stored, self.access)
            self.prefix = await scope.enter_async_context(client)
        engine = settings.for_engine(self.role)
        self.metrics.load = started.load
        self.board.load = load_to_proto(self.metrics.load)
        self.board.start(
            worker_pb2.WorkerSnapshot(
                worker_id=self.worker_id,
                incarnation=self.incarnation,
                role=_ROLES[self.role],
                model=settings.model_name,
                layout=layout_to_proto(started.layout),
                max_model_len=started.max_model_len,
                vocab_size=started.vocab_size,
                total_blocks=started.total_blocks,
                max_num_seqs=engine.max_num_seqs,
                max_num_batched_tokens=engine.max_num_batched_tokens,
                endpoint=server.endpoint,
                node=self.node,
                device=started.device,
                versions={"pdserve": software_version(), **started.versions},
                draining=self.board.draining,
                protocol=our_versions(),
                transports=started.transports,
                lookahead_tokens=engine.lookahead_tokens if self.role == "decode" else 0,
                watermark_blocks=started.watermark_blocks,
            )
        )
        self.links.start(
            Hello(
                worker_id=self.worker_id,
                incarnation=self.incarnation,
                layout=started.layout,
                transport=settings.kv_transport,
                device=started.device,
                node=self.node,
                protocol_min=PROTOCOL_MIN,
                protocol_max=PROTOCOL_MAX,
            )
        )
        self.started = started
        details = {"worker_id": self.worker_id, "device": started.device, "blocks": started.total_blocks}
        log.info("ready", **details, **started.notes)
        await server.set_ready(True, **details, notes=started.notes)

    async def _engine_stalled(self, reason: str) -> None:
        """Leave the view while the engine does not answer; empty: come back to it."""
        if reason:
            log.error("engine_stalled", reason=reason)
            self.board.suspend(reason)
        else:
            log.info("engine_answers_again")
            self.board.resume()
        assert self._server is not None
        await self._server.set_health(not (reason or self.board.draining))

    async def _pump(self, service: RoleService) -> None:
        receive, board = self.engine.receive, self.board
        while True:
            message = await receive()
            match message:
                case StepDone():
                    self.metrics.take(message)
                    self._sent.taken(message.prompts_taken)
                    load = load_to_proto(self._sent.with_sent(message.load))
                    board.publish(load, message.stored, message.removed)
                    service.on_step(message)
                case Pong():
                    self._pulse.felt()
                case KvCommitted():
                    self.metrics.observe_transfer(message.seconds, message.exposed)
                    service.on_message(message)
                case ReservedPages() | AttemptFailed() | Rearmed() | AlreadyReady() | TicketReady():
                    service.on_message(message)
                case Detached() | HandOffFailed():
                    service.on_message(message)
                case BlocksExported():
                    if self.prefix is not None:
                        self.prefix.on_exported(message)
                case IntegrityReport(problem, _):
                    if problem:
                        log.error("integrity", problem=problem)
                case _:
                    log.error("unexpected_message", kind=type(message).__name__)

    async def _pump_links(self) -> None:
        while True:
            self.links.on_engine(await self.engine.receive_link())

    def _on_report(self, report: TransferReport) -> None:
        report = replace(report, links=[self._with_path(link) for link in report.links])
        self.metrics.report = report
        self.board.publish_links(links_to_proto(report))

    def _with_path(self, link: LinkReport) -> LinkReport:
        """With what the engine does not know: what the two ends' machines have between them."""
        return replace(link, path=self.links.path_of(link.peer), degraded=self.links.degraded_of(link.peer))

    async def drain(self) -> None:
        """On the way out: leave the view, let what runs finish or go elsewhere, then end the streams that never end by
        themselves."""
        await self.leave()
        try:
            if self._service is not None:
                self._service.draining(self.settings.drain_seconds)
                await self._service.finished()
        finally:
            await self.board.close()  # first: whose session ends before it has heard of the leaving takes us for lost
            if self._service is not None:
                self._service.close()
            await self.links.close()


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


MakeService = Callable[[WorkerFront], tuple[RoleService, Service]]


async def _serve(settings: WorkerSettings, role: str, worker_id: str, make: MakeService) -> None:
    front = WorkerFront(settings, role, worker_id)
    service, own = make(front)
    export = Metrics(front.metrics.registry, role, front.worker_id)
    check = internal_check(front.access, settings)
    async with GrpcServer(settings, [own, *front.services()], export, check=check) as server:
        server.on_drain.append(front.drain)
        work = asyncio.create_task(front.run(server, service), name="front")
        try:
            await server.run_until_stopped()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


def run_worker(role: str, make: MakeService, argv: Sequence[str] | None = None) -> int:
    """The main function of a worker service. Returns the exit status: 0 after a stop, 1 after a failure."""
    settings = WorkerSettings.load(argv)
    setup_logs(role, settings.log_level)
    worker_id = settings.name_worker(role)
    stop_tracing = setup_tracing(role, settings.otlp_endpoint, ring=settings.trace_ring, instance=worker_id)
    if settings.front_core_list and hasattr(os, "sched_setaffinity"):
        # By default the front shares the engine's cores: on another worker's it would be that one's jitter.
        os.sched_setaffinity(0, settings.front_core_list)
    try:
        asyncio.run(_serve(settings, role, worker_id, make))
    except ServiceFailed as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except PdserveError as error:
        log.error("failed", error=str(error))
        sys.stderr.write(f"error: {error}\n")
        return 1
    finally:
        stop_tracing()
    return 0
