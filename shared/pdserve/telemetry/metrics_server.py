"""The Prometheus endpoint of a service: one path, a few scrapes at once, from threads of its own."""

from __future__ import annotations

import asyncio
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from pdserve.core.errors import ConfigError

PATH = "/metrics"
MAX_SCRAPES = 8  # at once; whoever comes beyond that is hung up on
TIMEOUT = 10.0  # seconds that a client may take over each read and write

_StartResponse = Callable[..., Any]


class MetricsServer:
    """Serves a registry at http://host:port/metrics while its scope is open; anything else is 404.

    `endpoint` is host:port once it is open. Raises ConfigError where it cannot listen.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """An empty host is every address, port 0 any free one."""
        self.endpoint = ""
        self._registry, self._host, self._port = registry, host or "0.0.0.0", port
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    async def __aenter__(self) -> Self:
        host, port = self._host, self._port
        try:
            # Off the event loop: a host's name may have to be looked up.
            self._server = await asyncio.to_thread(_Server, host, port)
        except OSError as error:
            raise ConfigError(f"cannot serve metrics at {host}:{port}: {error.strerror or error}") from error
        self._server.set_app(_only_metrics(self._registry))
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        bound = self._server.server_address[1]
        self.endpoint = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None and self._thread is not None
        await asyncio.to_thread(self._server.shutdown)
        self._thread.join()
        self._server.server_close()


def _only_metrics(registry: CollectorRegistry) -> Callable[[dict[str, Any], _StartResponse], Iterable[bytes]]:
    metrics = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start_response: _StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] == PATH:
            answer: Iterable[bytes] = metrics(environ, start_response)
            return answer
        status = HTTPStatus.NOT_FOUND
        start_response(f"{status.value} {status.phrase}", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"only {PATH} is here\n".encode()]

    return app


class _Handler(WSGIRequestHandler):
    timeout = TIMEOUT  # of the connection's socket

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are no news."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True  # a client that hangs must not hold up the end of the process

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._slots = threading.BoundedSemaphore(MAX_SCRAPES)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # Without the reverse look-up of the host's name that the standard library's has, which may take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away or was too slow is its own loss."""
