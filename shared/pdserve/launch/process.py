"""One service as a child process: how it starts, what it tells, how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.core.errors import Unavailable

LOG_LINES = 15


@dataclass(frozen=True, slots=True)
class LaunchEvent:
    """Something that a service told its launcher: `kind` is bound, progress, ready, failed or exited."""

    service: str
    kind: str
    stage: str = ""
    done: float = 0.0


class Service:
    """A running child. Made by `start`; its owner must end it with `stop` or `kill`.

    It tells its events over a socket pair, whose launcher end also ties their lives together: when this process is
    gone, by whatever means, the service sees the end of that socket and stops at once.
    """

    def __init__(self, name: str, module: str, process: asyncio.subprocess.Process, log: Path | None) -> None:
        self.name = name
        self.module = module
        self.pid = process.pid
        self.endpoint = ""
        self.details: dict[str, Any] = {}
        self.error = ""
        self.expected_to_end = False
        self._process = process
        self._log = log
        self._bound = asyncio.Event()
        self._ready = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self.exited: asyncio.Task[int] = asyncio.create_task(self._wait(), name=f"exit of {name}")

    @classmethod
    async def start(
        cls,
        module: str,
        name: str,
        arguments: Sequence[str],
        *,
        log_folder: Path | None,
        listener: Callable[[LaunchEvent], None],
    ) -> Service:
        """Start `python -m pdserve.<module>`. Logs go to `<log_folder>/<name>.log`, or to this process' stderr."""
        ours, theirs = socket.socketpair()
        log = log_folder / f"{name}.log" if log_folder else None
        with theirs, contextlib.ExitStack() as files:
            stderr = files.enter_context(log.open("ab")) if log else None
            flags = [*arguments, "--launcher-fd", str(theirs.fileno())]
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", f"pdserve.{module}", *flags),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
                    start_new_session=True,  # a Ctrl-C is for the launcher; it ends the others in order
                )
            except BaseException:
                ours.close()
                raise
        service = cls(name, module, process, log)
        service._reader = asyncio.create_task(service._read(ours, listener), name=f"events of {name}")
        return service

    async def bound(self) -> str:
        """Wait until the service listens, and return where. Raises Unavailable when it ends before that."""
        await self._until(self._bound)
        return self.endpoint

    async def ready(self) -> None:
        """Wait until the service can work. Raises Unavailable when it ends before that."""
        await self._until(self._ready)

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def terminate(self) -> None:
        """Ask it to drain and end. Does nothing once it is gone."""
        self.expected_to_end = True
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it, and what it started, at once. Does nothing once it is gone."""
        self.expected_to_end = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Wait for its end and for its last event. The caller has asked it to end."""
        await self.exited
        if self._reader:
            await self._reader

    def obituary(self) -> str:
        """Why it ended, for people: its own words if it said any, else how it exited; then its last log lines."""
        code = self._process.returncode
        how = f"exit code {code}"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                how = f"killed by {signal.Signals(-code).name}"
        lines = [f"{self.name} (pid {self.pid}) ended: {self.error or how}"]
        tail = self.log_tail()
        if tail:
            lines += [f"last lines of {self._log}:", *(f"  {line}" for line in tail)]
        return "\n".join(lines)

    def log_tail(self, lines: int = LOG_LINES) -> list[str]:
        """The newest lines of its log file; none where it has no file."""
        if self._log is None or not self._log.is_file():
            return []
        with self._log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 64 * 1024))
            return file.read().decode(errors="replace").splitlines()[-lines:]

    async def _until(self, event: asyncio.Event) -> None:
        waiter = asyncio.create_task(event.wait())
        try:
            await asyncio.wait({waiter, self.exited}, return_when=asyncio.FIRST_COMPLETED)
            if not event.is_set():
                if self._reader:
                    await self._reader  # its last words may still be on the way
                raise Unavailable(self.obituary())
        finally:
            waiter.cancel()

    async def _wait(self) -> int:
        code = await self._process.wait()
        if not self.expected_to_end:
            # What it started must not outlive it; when it was killed it had no chance to see to that itself.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        return code

    async def _read(self, ours: socket.socket, listener: Callable[[LaunchEvent], None]) -> None:
        """Take events until the service's end closes. The socket stays open until then: it is the life line."""
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            with contextlib.suppress(ConnectionResetError):
                while line := await reader.readline():
                    self._take(json.loads(line), listener)
            await self.exited
            listener(LaunchEvent(self.name, "exited"))
        finally:
            writer.close()

    def _take(self, message: dict[str, Any], listener: Callable[[LaunchEvent], None]) -> None:
        kind = str(message["event"])
        if kind in ("bound", "ready"):
            self.endpoint = str(message["endpoint"])
            self._bound.set()
        if kind == "ready":
            self.details = dict(message.get("details") or {})
            self._ready.set()
        if kind == "failed":
            self.error = str(message["error"])
        listener(LaunchEvent(self.name, kind, str(message.get("stage", "")), float(message.get("done", 0.0))))

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
