"""The tie between a service and the process that started it.

The launcher makes a socket pair, keeps one end and hands the other down as ``--launcher-fd``. The service writes one
JSON object a line: ``bound``, ``progress``, ``ready``, ``failed``. The end of the stream tells the service that its
launcher is gone, so that nothing outlives what started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

from pdserve.core.process import die_with_parent


class Launcher:
    """The service's end. With `fd` None every report goes nowhere and `gone` is never set."""

    def __init__(self, fd: int | None) -> None:
        self.fd = fd
        self.gone = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take over the socket. The owner must `close` it."""
        if self.fd is None:
            return
        die_with_parent()
        sock = socket.socket(fileno=self.fd)
        sock.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=sock)
        self._watch = asyncio.create_task(self._until_end(reader), name="launcher")

    def report(self, event: str, **fields: Any) -> None:
        """Write one line; never waits and never raises for a launcher that is gone."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps({"event": event, **fields}).encode() + b"\n")

    async def close(self) -> None:
        """Hand over what was reported and let go of the socket."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._writer.wait_closed()

    async def _until_end(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(4096):
                pass
        self.gone.set()
