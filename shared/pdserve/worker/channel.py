"""Typed messages over a socket pair: a 4-byte little-endian length, then msgpack.

The engine process holds the blocking end, the front the asyncio end. Both processes belong to one worker, so a
message that does not decode is a bug, not an attack; its size is bounded all the same.
"""

from __future__ import annotations

import asyncio
import io
import socket
import struct
import threading
from typing import Generic, TypeVar

import msgspec

_LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 1 << 30

In = TypeVar("In")
Out = TypeVar("Out")


class Channel(Generic[In, Out]):
    """The blocking end. `send` may be called from several threads, `receive` from one."""

    def __init__(self, sock: socket.socket, receives: type[In]) -> None:
        self._sock = sock
        self._reader: io.BufferedReader = sock.makefile("rb", buffering=1 << 16)  # type: ignore[assignment]
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Out) -> None:
        """Raises BrokenPipeError or ConnectionResetError when the other process is gone."""
        payload = self._encoder.encode(message)
        with self._lock:
            self._sock.sendall(_LENGTH.pack(len(payload)) + payload)

    def receive(self) -> In | None:
        """The next message; None at the end. Waits."""
        try:
            header = self._reader.read(_LENGTH.size)
            if len(header) < _LENGTH.size:
                return None
            payload = self._reader.read(_LENGTH.unpack(header)[0])
        except ConnectionResetError:  # it died with messages of ours unread
            return None
        return self._decoder.decode(payload)

    def buffered(self) -> bool:
        """Whether bytes of a further message were read from the socket already, so that polling would not see them.

        Only true right after a `receive`; never blocks.
        """
        self._sock.setblocking(False)
        try:
            return bool(self._reader.peek(1))
        finally:
            self._sock.setblocking(True)

    def close(self) -> None:
        self._reader.close()
        self._sock.close()


class AsyncChannel(Generic[In, Out]):
    """The asyncio end. Use `await AsyncChannel.open(sock, receives)`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, receives: type[In]) -> None:
        self._reader, self._writer = reader, writer
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    async def open(cls, sock: socket.socket, receives: type[In]) -> AsyncChannel[In, Out]:
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 20)
        return cls(reader, writer, receives)

    def send(self, message: Out) -> None:
        """Queue a message; never waits. Once the other process is gone it is dropped, and `receive` says so."""
        payload = self._encoder.encode(message)
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(payload)) + payload)

    async def drain(self) -> None:
        """Wait until the other process has taken most of what was sent."""
        await self._writer.drain()

    async def receive(self) -> In | None:
        """The next message; None once the other process is gone."""
        try:
            length = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))[0]
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):  # BrokenPipeError, where a write found out first
            return None

    async def close(self) -> None:
        self._writer.close()
