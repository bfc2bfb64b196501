"""The front's half of a worker: it starts the engine process, and sees to it that neither outlives the other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Self

import structlog

from pdserve.core.errors import ConfigError, ModelError, PdserveError, Unavailable
from pdserve.transfer.nccl_environment import ENVIRONMENT
from pdserve.worker.channel import AsyncChannel
from pdserve.worker.messages import (
    EngineFailed,
    EngineSettings,
    EngineStarted,
    FromEngine,
    LinkMessage,
    Progress,
    Shutdown,
    ToEngine,
)

log = structlog.get_logger(__name__)

# Between two signs of life while it starts, in seconds; reading big weights from a slow disk shows progress.
START_TIMEOUT = 600.0
# From the order to shut down until the process is killed, in seconds.
SHUTDOWN_GRACE = 5.0
_ERRORS: dict[str, type[PdserveError]] = {"ConfigError": ConfigError, "ModelError": ModelError}


class EngineDied(Unavailable):
    """The engine process is gone, or said that it cannot go on."""


class EngineClient:
    """A running engine process. `async with` ends it: an order first, a kill after SHUTDOWN_GRACE.

    `start` must be awaited inside the scope, before anything else.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._engine: AsyncChannel[FromEngine, ToEngine] | None = None
        self._links: AsyncChannel[LinkMessage, LinkMessage] | None = None
        self._started = False

    async def __aenter__(self) -> Self:
        with contextlib.ExitStack() as theirs:
            engine, engine_far = socket.socketpair()
            theirs.enter_context(engine_far)
            links, links_far = socket.socketpair()
            theirs.enter_context(links_far)
            fds = (engine_far.fileno(), links_far.fileno())
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pdserve.worker.engine_process"),
                *("--engine-fd", str(fds[0]), "--link-fd", str(fds[1])),
                pass_fds=fds,
                stdin=asyncio.subprocess.DEVNULL,
                env=engine_environment(self._settings.threads),
            )
        self._engine = await AsyncChannel.open(engine, FromEngine)  # type: ignore[arg-type]
        self._links = await AsyncChannel.open(links, LinkMessage)  # type: ignore[arg-type]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        assert process is not None
        if self._started:
            self.send(Shutdown())
        else:
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # it loads, reads nothing, and has nothing to lose
        try:
            async with asyncio.timeout(SHUTDOWN_GRACE):
                # Somebody has to read, or an engine that is in the middle of a message never sees the order.
                while self._engine is not None and await self._engine.receive() is not None:
                    pass
                await process.wait()
        except TimeoutError:
            log.warning("engine_killed", reason=f"it did not end within {SHUTDOWN_GRACE} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            for channel in (self._engine, self._links):
                if channel is not None:
                    await channel.close()

    async def start(self, on_progress: Callable[[str, float], None]) -> EngineStarted:
        """Send the settings and wait until the engine can work.

        Raises ConfigError or ModelError where that is what it says, EngineDied for any other end.
        """
        self.send(self._settings)
        while True:
            try:
                async with asyncio.timeout(START_TIMEOUT):
                    message = await self.receive()
            except TimeoutError:
                raise EngineDied(f"the engine gave no sign of life for {START_TIMEOUT} s while starting") from None
            if isinstance(message, EngineStarted):
                self._started = True
                return message
            if isinstance(message, Progress):
                on_progress(message.stage, message.done)

    def send(self, message: ToEngine) -> None:
        """Queue a message; never waits. To an engine that is gone: nothing (`receive` tells)."""
        if self._engine is not None:
            self._engine.send(message)

    def send_link(self, message: LinkMessage) -> None:
        """As `send`, on the link pair."""
        if self._links is not None:
            self._links.send(message)

    async def drain(self) -> None:
        """Wait until the engine has taken most of what was sent; for senders of much."""
        if self._engine is not None:
            with contextlib.suppress(ConnectionError):
                await self._engine.drain()

    async def receive(self) -> FromEngine:
        """The next message. Raises EngineDied, or what EngineFailed stands for, once there will be none."""
        assert self._engine is not None
        message = await self._engine.receive()
        if message is None:
            raise EngineDied(await self._obituary())
        if isinstance(message, EngineFailed):
            raise _ERRORS.get(message.kind, EngineDied)(f"engine: {message.message}")
        return message

    async def receive_link(self) -> LinkMessage:
        """The next message of the link pair. Raises EngineDied."""
        assert self._links is not None
        message = await self._links.receive()
        if message is None:
            raise EngineDied(await self._obituary())
        return message

    async def _obituary(self) -> str:
        assert self._process is not None
        try:
            async with asyncio.timeout(SHUTDOWN_GRACE):
                code = await self._process.wait()
        except TimeoutError:
            return "the engine process closed its socket and went on"
        return f"the engine process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"


def engine_environment(threads: int) -> dict[str, str]:
    """This process's environment with what must be set before torch is loaded."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        **ENVIRONMENT,
    }
