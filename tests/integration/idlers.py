"""Connections by the thousand that ask for nothing: bare ones, and ones that speak HTTP/2 and answer its pings."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

AT_ONCE = 200  # connections that are being opened at a time; listeners have backlogs
FRAME_HEAD = 9
SETTINGS, PING, GOAWAY = 4, 6, 7
ACK = 1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int = 0, payload: bytes = b"") -> bytes:
    """A frame of stream 0 (RFC 9113, 4.1)."""
    return len(payload).to_bytes(3) + bytes((kind, flags)) + bytes(4) + payload


class Idler(asyncio.Protocol):
    """A connection that says no more than it has to: nothing, or with `http2` what keeps one alive. `greeted` is done
    when the server's settings are here (at once without `http2`), `closed` when the connection is over."""

    def __init__(self, *, http2: bool) -> None:
        loop = asyncio.get_running_loop()
        self.greeted: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.received = b""
        self.transport: asyncio.Transport
        self._http2 = http2
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self._http2:
            transport.write(PREFACE + frame(SETTINGS))
        else:
            self.greeted.set_result(None)

    def data_received(self, data: bytes) -> None:
        if not self._http2:
            self.received += data
            return
        self._buffer += data
        while len(self._buffer) >= FRAME_HEAD:
            end = FRAME_HEAD + int.from_bytes(self._buffer[:3])
            if len(self._buffer) < end:
                return
            kind, flags, payload = self._buffer[3], self._buffer[4], self._buffer[FRAME_HEAD:end]
            self._buffer = self._buffer[end:]
            self._take(kind, flags, payload)

    def _take(self, kind: int, flags: int, payload: bytes) -> None:
        if kind in (SETTINGS, PING) and not flags & ACK:
            self.transport.write(frame(kind, ACK, payload if kind == PING else b""))
        if kind == SETTINGS and not self.greeted.done():
            self.greeted.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        for future in (self.greeted, self.closed):
            if not future.done():
                future.set_result(None)


@asynccontextmanager
async def idling(endpoint: str, count: int, *, http2: bool) -> AsyncIterator[list[Idler]]:
    """So many connections to `endpoint`, each with the server's greeting, or closed by it. Closed at the end."""
    host, port = endpoint.rsplit(":", 1)
    loop, room = asyncio.get_running_loop(), asyncio.Semaphore(AT_ONCE)

    async def one() -> Idler:
        async with room:
            _, idler = await loop.create_connection(lambda: Idler(http2=http2), host, int(port))
            await idler.greeted
            return idler

    async with asyncio.TaskGroup() as tasks:
        opening = [tasks.create_task(one()) for _ in range(count)]
    idlers = [task.result() for task in opening]
    try:
        yield idlers
    finally:
        for idler in idlers:
            idler.transport.abort()
        await asyncio.gather(*(idler.closed for idler in idlers))


@contextmanager
def descriptors(soft: int) -> Iterator[None]:
    """This process's soft limit, which processes that it starts inherit. ValueError where the hard one is lower."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
