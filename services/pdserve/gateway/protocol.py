"""Connections over HTTP as uvicorn has them, with bounds of ours: how many there are, and how long each may be idle."""

from __future__ import annotations

import asyncio
from typing import cast

import msgspec
import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdserve.gateway.disconnect import HANG_UP
from pdserve.gateway.errors import UNAVAILABLE_RETRY, ApiError

log = structlog.get_logger(__name__)

_TELL_EVERY = 10.0  # seconds between two warnings that there are too many
# Who is turned away may read that for so many seconds. A close at once would take back what was said, where the client
# had sent something already.
_LINGER = 1.0
_LINGERING = 64  # connections at a time; what comes beyond these is closed without a word


class Config(uvicorn.Config):
    """uvicorn's, and `max_connections`, beyond which new ones are told to come back."""

    max_connections: int
    told: float = -_TELL_EVERY  # the loop's time of the latest warning


class Protocol(HttpToolsProtocol):
    """One connection. Without a whole request head for the time that keep-alive allows, from its beginning or from its
    latest answer on, it is closed; uvicorn by itself would wait for a first one, and for the rest of any, for ever.

    It lets an answer close its connection. ASGI has no word for it, and uvicorn's own way waits until all was read.
    """

    _waits: asyncio.TimerHandle | None = None
    _turned_away = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        config = cast("Config", self.config)
        super().connection_made(transport)
        beyond = len(self.connections) - config.max_connections
        if beyond > _LINGERING:
            transport.abort()
        elif beyond > 0:
            self._turn_away(config)
        else:
            self._wait(self.timeout_keep_alive)

    def data_received(self, data: bytes) -> None:
        if not self._turned_away:
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._waited()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {HANG_UP: {"abort": self.transport.abort}}

    def on_headers_complete(self) -> None:
        self._waited()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():  # else the next request is here already
            self._wait(self.timeout_keep_alive)

    def _wait(self, seconds: float) -> None:
        self._waited()
        self._waits = self.loop.call_later(seconds, self.transport.close)

    def _waited(self) -> None:
        if self._waits is not None:
            self._waits.cancel()
            self._waits = None

    def _turn_away(self, config: Config) -> None:
        """Say that there are too many, and close soon."""
        self._turned_away = True
        if self.loop.time() - config.told >= _TELL_EVERY:
            config.told = self.loop.time()
            log.warning("too_many_connections", max_connections=config.max_connections)
        self.transport.write(_FULL)
        self.transport.write_eof()
        self._wait(_LINGER)


def _full() -> bytes:
    error = ApiError(
        503, "this gateway has all the connections that it takes", kind="server_error", code="too_many_connections",
        retry_after=UNAVAILABLE_RETRY,
    )  # fmt: skip
    body = msgspec.json.encode(error.body())
    fields = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in {**fields, **error.headers()}.items())
    return f"HTTP/1.1 503 Service Unavailable\r\n{head}\r\n".encode() + body


_FULL = _full()
