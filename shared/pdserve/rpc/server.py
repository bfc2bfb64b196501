"""The start and the end of every gRPC service: binding, health, reflection, drain, signals, launcher."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.core.errors import ConfigError, PdserveError
from pdserve.rpc.access import Access
from pdserve.rpc.channel import MAX_MESSAGE_BYTES, server_options
from pdserve.rpc.descriptors import room_for
from pdserve.rpc.guard import Check, Guard, fleet_only
from pdserve.rpc.launcher import Launcher
from pdserve.rpc.malformed import MalformedMessages
from pdserve.rpc.settings import ServiceSettings
from pdserve.telemetry.export import Metrics, export_metrics

log = structlog.get_logger(__name__)

# The generated add_XServicer_to_server, the servicer, and the full service name.
Service = tuple[Callable[[Any, Any], None], Any, str]
# How long answers that are on their way may take once everything else is over, in seconds.
STOP_GRACE = 1.0


class ServiceFailed(PdserveError):
    """The service could not go on; its process should exit with a status other than 0."""


class GrpcServer:
    """A bound gRPC server as a scope.

    Inside `async with` the port is bound (`endpoint`) and health "" is SERVING; each service's own health is
    NOT_SERVING until `set_ready(True)`. Callbacks in `on_drain` run when the service is told to stop, together and for
    at most `drain_seconds`. `stop_requested` may be set by anyone on the loop; `fail` stops with an error.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        services: Sequence[Service],
        metrics: Metrics | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        check: Check | None = None,
    ) -> None:
        """`metrics` are exported, as the settings say, from the binding to the end. A larger message than
        `max_message_bytes` is refused before it is read, and so is what `check` does not let in."""
        self.endpoint = ""
        self.metrics_url: str | None = None
        self.stop_requested = asyncio.Event()
        self.draining = False
        self.on_drain: list[Callable[[], Awaitable[None]]] = []
        self.launcher = Launcher(settings.launcher_fd)
        self._settings = settings
        self._metrics = metrics
        self._scope = contextlib.AsyncExitStack()
        self._names = [name for _, _, name in services]
        self._health = health.aio.HealthServicer()
        self._failure: str | None = None
        self._signals = 0
        self._signal_seen = asyncio.Event()
        self._stop_now = asyncio.Event()
        guards = [Guard(check)] if check else []
        connections = room_for(settings.max_connections)
        options = server_options(max_message_bytes, connections, settings.idle_seconds)
        self._server = grpc.aio.server(interceptors=[*guards, MalformedMessages()], options=options)
        for add, servicer, _ in services:
            add(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def __aenter__(self) -> Self:
        await self.launcher.start()
        try:
            host, port = self._settings.host, self._settings.port
            tls = self._settings.server_tls
            credentials = tls.credentials() if tls else None
            try:
                bound = self._listen(join_host_port(host, port), credentials)
            except RuntimeError as error:
                raise ConfigError(f"cannot listen on {join_host_port(host, port)}: {_obstacle(host, port)}") from error
            self.endpoint = join_host_port(self._settings.advertise_host or advertised_host(host), bound)
            await self._set_health(self._names, serving=False)
            if self._metrics is not None:
                self.metrics_url = await self._scope.enter_async_context(export_metrics(self._metrics, self._settings))
            await self._set_health([""], serving=True)
            await self._server.start()
        except BaseException as error:
            self.launcher.report("failed", error=str(error))
            await self._scope.aclose()
            await self.launcher.close()
            raise
        self.launcher.report("bound", endpoint=self.endpoint)
        log.info("bound", endpoint=self.endpoint, services=self._names, metrics=self.metrics_url, tls=tls is not None)
        return self

    def _listen(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        if credentials is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, credentials)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, asyncio.CancelledError):
            self.launcher.report("failed", error=str(error) or repr(error))
        await self._server.stop(0)
        await self._scope.aclose()
        await self.launcher.close()

    async def set_ready(self, ready: bool, **details: Any) -> None:
        """Set every service's health. `details`, and where metrics are, go to the launcher with the event ``ready``."""
        await self._set_health(self._names, serving=ready and not self.draining)
        if ready and not self.draining:
            if self.metrics_url is not None:
                details["metrics"] = self.metrics_url
            self.launcher.report("ready", endpoint=self.endpoint, details=details)

    async def set_health(self, serving: bool) -> None:
        """As `set_ready`, of which the launcher hears nothing: for what comes and goes."""
        await self._set_health(self._names, serving=serving and not self.draining)

    def fail(self, reason: str) -> None:
        """Stop at once, without draining; `run_until_stopped` raises ServiceFailed. The first reason counts."""
        if self._failure is None:
            self._failure = reason
            log.error("service_failed", reason=reason)
        self._stop_now.set()

    async def run_until_stopped(self) -> None:
        """Serve until SIGTERM, SIGINT or `stop_requested`, then drain; a second signal, `fail` or a launcher that is
        gone stops at once. Raises ServiceFailed after `fail`."""
        loop = asyncio.get_running_loop()
        handled = []
        for number in (signal.SIGTERM, signal.SIGINT):
            # Only the main thread of a process may; in others (notebooks, tests) `stop_requested` does.
            with contextlib.suppress(RuntimeError, ValueError, NotImplementedError):
                loop.add_signal_handler(number, self._on_signal)
                handled.append(number)
        try:
            await _first(self.stop_requested, self._signal_seen, self._stop_now, self.launcher.gone)
            await self._drain()
        finally:
            for number in handled:
                loop.remove_signal_handler(number)
        if self._failure is not None:
            raise ServiceFailed(self._failure)

    async def _drain(self) -> None:
        self.draining = True
        await self._set_health(["", *self._names], serving=False)
        started = time.monotonic()
        if not (self._stop_now.is_set() or self.launcher.gone.is_set()) and self.on_drain:
            log.info("draining", seconds=self._settings.drain_seconds)
            work: asyncio.Future[Any] = asyncio.gather(*(callback() for callback in self.on_drain))
            hurry: asyncio.Future[Any] = asyncio.ensure_future(_first(self._stop_now, self.launcher.gone))
            try:
                await asyncio.wait(
                    {work, hurry}, timeout=self._settings.drain_seconds, return_when=asyncio.FIRST_COMPLETED
                )
                if not work.done():
                    log.warning("drain_incomplete", seconds=round(time.monotonic() - started, 3))
            finally:
                for future in (work, hurry):
                    future.cancel()
                for outcome in await asyncio.gather(work, hurry, return_exceptions=True):
                    if isinstance(outcome, Exception):
                        log.error("drain_failed", error=repr(outcome))
        at_once = self._stop_now.is_set() or self.launcher.gone.is_set()
        await self._server.stop(0 if at_once else STOP_GRACE)
        log.info("stopped", seconds=round(time.monotonic() - started, 3))

    def _on_signal(self) -> None:
        self._signals += 1
        self._signal_seen.set()
        if self._signals > 1:
            self._stop_now.set()

    async def _set_health(self, names: Sequence[str], *, serving: bool) -> None:
        response = health_pb2.HealthCheckResponse
        for name in names:
            await self._health.set(name, response.SERVING if serving else response.NOT_SERVING)


async def _first(*events: asyncio.Event) -> None:
    """Wait until one of `events` is set."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def internal_check(access: Access, settings: ServiceSettings) -> Check | None:
    """What a service wants to be shown that answers its fleet alone; None: nothing, which is logged where others than
    this machine can reach it."""
    if access.secret is not None:
        return fleet_only(access.secret)
    warn_where_open(settings, "internal-secret-file")
    return None


def warn_where_open(settings: ServiceSettings, unset: str) -> None:
    """Log that others than this machine's may do everything, because that setting is unset."""
    if not is_loopback(settings.host):
        log.warning("open_to_anybody", host=settings.host, unset=unset)


def is_loopback(host: str) -> bool:
    """Whether who listens on `host` is reached from this machine alone. Of a name only localhost is known."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def advertised_host(host: str) -> str:
    """The name for others to connect to: `host`, or this machine's name where it means every interface."""
    return socket.gethostname() if host in ("", "0.0.0.0", "::") else host


def data_host(host: str) -> str:
    """The address to bind for traffic between workers: `host`, or, where it means every interface, the one that this
    machine's traffic leaves from. Sends nothing; loopback where there is no route."""
    if host not in ("", "0.0.0.0", "::"):
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737): connecting a datagram socket only picks a route
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address


def _obstacle(host: str, port: int) -> str:
    """Why nothing can listen at an address, in the system's words; grpc does not tell."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, _, _, address in found:
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return "another process took it, and has let go of it since"


def join_host_port(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
