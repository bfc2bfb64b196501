"""The start and the end of an HTTP service: binding, launcher, signals, drain. Uvicorn does the HTTP in between."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
import ssl
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import structlog
import uvicorn
from starlette.types import ASGIApp

from pdserve.core.errors import ConfigError, PdserveError
from pdserve.gateway.protocol import Config, Protocol
from pdserve.rpc.descriptors import room_for
from pdserve.rpc.launcher import Launcher
from pdserve.rpc.server import advertised_host, join_host_port
from pdserve.rpc.settings import ServiceSettings

log = structlog.get_logger(__name__)

_BACKLOG = 2048


class HttpFailed(PdserveError):
    """The HTTP server ended by itself."""


class HttpServer:
    """A bound HTTP server as a scope. Inside it `endpoint` is where others reach it; requests are answered as soon as
    `serve` was called. `draining` is set once it was told to stop."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.endpoint = ""
        self.draining = False
        self.stop_requested = asyncio.Event()
        self.launcher = Launcher(settings.launcher_fd)
        self.scheme = "https" if settings.server_tls else "http"
        self._settings = settings
        self._tls: ssl.SSLContext | None = None
        self._stop_now = asyncio.Event()
        self._socket: socket.socket | None = None

    async def __aenter__(self) -> Self:
        await self.launcher.start()
        host, port, tls = self._settings.host, self._settings.port, self._settings.server_tls
        try:
            self._tls = tls.context() if tls else None
            try:
                self._socket = _bind(host, port)
            except OSError as error:
                raise ConfigError(
                    f"cannot listen on {join_host_port(host, port)}: {error.strerror or error}"
                ) from error
            bound = self._socket.getsockname()[1]
            self.endpoint = join_host_port(self._settings.advertise_host or advertised_host(host), bound)
        except BaseException as error:
            self.launcher.report("failed", error=str(error))
            await self.launcher.close()
            raise
        self.launcher.report("bound", endpoint=self.endpoint)
        log.info("bound", endpoint=self.endpoint, tls=tls is not None)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, asyncio.CancelledError):
            self.launcher.report("failed", error=str(error) or repr(error))
        if self._socket is not None:
            self._socket.close()
        await self.launcher.close()

    def ready(self, **details: Any) -> None:
        """Tell the launcher that requests can be served."""
        self.launcher.report("ready", endpoint=self.endpoint, details=details)

    async def serve(self, app: ASGIApp) -> None:
        """Serve `app` until SIGTERM, SIGINT or `stop_requested`; then take no new connections and let running answers
        end, for at most `drain_seconds`. A second signal, or a launcher that is gone, stops at once."""
        assert self._socket is not None, "serve() belongs inside the scope"
        config = Config(
            app,
            loop="none",  # the loop runs already
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=math.ceil(self._settings.idle_seconds),
            timeout_graceful_shutdown=math.ceil(self._settings.drain_seconds),
        )
        config.load()
        config.ssl = self._tls  # uvicorn would make one of its own, which takes what is older than TLS 1.2
        config.max_connections = room_for(self._settings.max_connections)
        server = _Server(config)
        with self._signals():
            serving = asyncio.create_task(server.serve([self._socket]), name="http")
            waiting = asyncio.create_task(self._until_told(), name="until told to stop")
            try:
                await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    await serving
                    raise HttpFailed("the HTTP server ended by itself")
                self.draining = True
                log.info("draining", seconds=self._settings.drain_seconds)
                server.should_exit = True
                await self._drained(server, serving)
            finally:
                waiting.cancel()
                serving.cancel()
                await asyncio.gather(waiting, serving, return_exceptions=True)
        log.info("stopped")

    async def _until_told(self) -> None:
        await _first(self.stop_requested, self.launcher.gone)

    async def _drained(self, server: _Server, serving: asyncio.Task[None]) -> None:
        hurry = asyncio.create_task(_first(self._stop_now, self.launcher.gone), name="stop at once")
        try:
            await asyncio.wait({serving, hurry}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                server.force_exit = True
                for task in list(server.server_state.tasks):
                    task.cancel()
            await serving
        finally:
            hurry.cancel()
            await asyncio.gather(hurry, return_exceptions=True)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handled = []
        for number in (signal.SIGTERM, signal.SIGINT):
            # Only the main thread of a process may; in others (notebooks, tests) `stop_requested` does.
            with contextlib.suppress(RuntimeError, ValueError, NotImplementedError):
                loop.add_signal_handler(number, self._on_signal)
                handled.append(number)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self.stop_requested.is_set():
            self._stop_now.set()
        self.stop_requested.set()


class _Server(uvicorn.Server):
    """Leaves signals to us: a second one must not be raised again after the drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket; an empty host is every IPv4 interface. Raises OSError."""
    address = host.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


async def _first(*events: asyncio.Event) -> None:
    """Wait until one of `events` is set."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
