"""This router's standing stream to one worker, whatever its role: the greeting, commands up, events down, the end."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import grpc.aio

from pdserve.core.errors import Unavailable
from pdserve.router.tasks import until_first_ends
from pdserve.rpc.versions import our_versions
from pdserve.v1 import decode_pb2

Command = TypeVar("Command")
Event = TypeVar("Event")


class WorkerSession(ABC, Generic[Command, Event]):
    """One session. Whoever opens it runs `run` until it raises, and must `close` it: that tells everybody in it."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[Command, Event],
        command: type[Command],
        event: type[Event],
        router_id: str,
        patience: float,
    ) -> None:
        """`call` carries `command` up and `event` down. `patience`, in seconds, bounds the handshake and each write."""
        self.worker_id = ""
        self.incarnation = ""
        self._call = call
        self._command, self._event = command, event
        self._router_id = router_id
        self._patience = patience
        self._commands: asyncio.Queue[Command] = asyncio.Queue()
        self._closed: str | None = None

    async def open(self) -> None:
        """Greet the worker. Raises Unavailable or grpc's error."""
        hello = decode_pb2.SessionHello(protocol=our_versions(), router_id=self._router_id)
        async with asyncio.timeout(self._patience):
            await self._call.write(self._command(hello=hello))  # type: ignore[call-arg]
            answer: Any = await self._call.read()
        if not isinstance(answer, self._event) or answer.WhichOneof("event") != "welcome":  # type: ignore[attr-defined]
            raise Unavailable("the worker did not welcome the session")
        welcome: decode_pb2.SessionWelcome = answer.welcome  # type: ignore[attr-defined]
        self.worker_id, self.incarnation = welcome.worker_id, welcome.incarnation

    async def run(self) -> None:
        """Carry commands and events until the stream ends, which raises."""
        await until_first_ends(self._read(), self._write())

    def close(self, reason: str) -> None:
        """End the stream and everything in it. May be called again."""
        if self._closed is not None:
            return
        self._closed = reason
        self._call.cancel()
        self._lose(reason)

    @abstractmethod
    def _lose(self, reason: str) -> None:
        """Tell everybody whose work was in it; none of it goes on."""

    @abstractmethod
    def _take(self, event: Event) -> None:
        """Hand an event on to whom it is for; must not wait."""

    def _send(self, **command: Any) -> None:
        """Queue a command; never waits."""
        self._commands.put_nowait(self._command(**command))

    async def _write(self) -> None:
        while True:
            command = await self._commands.get()
            async with asyncio.timeout(self._patience):
                await self._call.write(command)

    async def _read(self) -> None:
        # Not iterated: grpc.aio does not let the two styles mix, and `open` reads.
        while isinstance(event := await self._call.read(), self._event):
            self._take(event)
        raise Unavailable("the worker ended the session")
