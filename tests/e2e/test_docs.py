"""What the README, docs/ and sdk/ tell people to type works: each page is run from its first block to its last.

A page runs in a folder that looks like the repository, so that what it writes is gone afterwards. Ports that it names
are replaced by free ones. How a block is run is said where it begins: see scripts/doc_blocks.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from scripts.doc_blocks import ROOT, SHELL, Block, blocks, pages

PATIENCE = 300.0  # seconds for a block, or until what a background block starts is ready; a busy machine is slow
STOP_GRACE = 20.0
_PORT = re.compile(r"((?:127\.0\.0\.1|localhost|0\.0\.0\.0):|--(?:http-|metrics-)?port[ =])(\d{2,5})")
# Not linked into the folder: history, and what a page may write itself.
_OWN = {".git", "docs"}
_MAKE = '#!/bin/sh\nexec "{make}" --old-file=.venv/installed "$@"\n'  # the tests run from what is installed already


class Page:
    """One page's folder, environment and ports, and what it left running."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[Background] = []
        self._ports: dict[str, int] = {}
        self._bin = folder / ".shims"
        self._bin.mkdir()
        for entry in ROOT.iterdir():
            if entry.name not in _OWN:
                (folder / entry.name).symlink_to(entry)
        make = self._bin / "make"
        make.write_text(_MAKE.format(make=shutil.which("make")))
        make.chmod(0o755)
        programs = Path(sys.executable).parent
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")},
            "PATH": os.pathsep.join([str(self._bin), str(programs), os.environ["PATH"]]),
            "PDSERVE_TARGET": f"127.0.0.1:{self.port('50051')}",
        }
        if cache := os.environ.get("PDSERVE_CACHE"):
            self.environment["PDSERVE_CACHE"] = cache

    def port(self, written: str) -> int:
        """The free port that stands for one that the page names."""
        if written not in self._ports:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self._ports[written] = probe.getsockname()[1]
        return self._ports[written]

    def adapted(self, text: str) -> str:
        """A block's text for this machine."""
        text = _PORT.sub(lambda match: f"{match[1]}{self.port(match[2])}", text)
        defaults = f"--port {self.port('50051')} --http-port {self.port('8000')}"
        return "\n".join(
            f"{line} {defaults}" if re.search(r"\bpdserve serve .*--model", line) and "--port" not in line else line
            for line in text.replace("\\\n", " ").splitlines()
        )

    async def run(self, block: Block) -> None:
        """Run one block to its end, or start it. AssertionError with all it said when it fails."""
        if block.how == "background":
            started = [await Background.start(self, line) for line in self._lines(block)]
            await asyncio.gather(*(process.ready() for process in started))
            return
        text = self.adapted(block.text)
        if block.language in SHELL:
            command = ["bash", "-euo", "pipefail", "-c", text]
        else:
            script = self.folder / f"block_{block.line}.py"
            script.write_text(text)
            command = ["python", str(script)]
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=self.folder,
            env=self.environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(), PATIENCE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        logs = "".join(f"\n--- {other.command}\n{other.tail()}" for other in self.running)
        assert process.returncode == 0, f"line {block.line}:\n{text}\n{said.decode()}{logs}"

    def _lines(self, block: Block) -> list[str]:
        return [self.adapted(line) for line in block.commands]


class Background:
    """A command that a page leaves running; `ready` waits until it says that it can work."""

    def __init__(self, command: str, process: asyncio.subprocess.Process) -> None:
        self.command = command
        self._process = process
        self._said: list[str] = []
        self._ready = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, page: Page, command: str) -> Background:
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", f"exec {command}"),
            cwd=page.folder,
            env=page.environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        background = cls(command, process)
        page.running.append(background)
        return background

    async def ready(self) -> None:
        waiter = asyncio.create_task(self._ready.wait())
        await asyncio.wait({waiter, self._reader}, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        assert self._ready.is_set(), f"{self.command} did not get ready:\n{self.tail()}"

    async def stop(self) -> None:
        """SIGTERM, as people would. AssertionError where it does not end well."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            status = await asyncio.wait_for(self._process.wait(), STOP_GRACE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._reader
        assert status == 0, f"{self.command} ended with {status}:\n{self.tail()}"

    def tail(self) -> str:
        return "".join(self._said[-40:])

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := (await self._process.stdout.readline()).decode():
            self._said.append(line)
            if _says_ready(line, self.command):
                self._ready.set()


def _says_ready(line: str, command: str) -> bool:
    """Whether a line of `pdserve serve`, or of a service's log, says that it can work. A suite also hands on what its
    services log, and the first of them is ready before the others."""
    if line.startswith("ready at"):
        return True
    try:
        event = json.loads(line)
    except ValueError:
        return False
    if event.get("ready") is True:
        return True
    alone = "ready" if "prefix_cache" not in command else "bound"
    return "pdserve serve" not in command and event.get("event") == alone


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Page]:
    """A page's scope: all that it left running ends with it."""
    page = Page(folder)
    try:
        yield page
    finally:
        outcomes = await asyncio.gather(*(process.stop() for process in page.running), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


def to_run(path: Path) -> list[Block]:
    """The blocks of a page that can run on a machine without GPUs and without others beside it."""
    found = blocks(path.read_text(encoding="utf-8"))
    return [block for block in found if block.language in (*SHELL, "python") and block.how != "no-run"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", [*filter(to_run, pages())], ids=lambda path: path.relative_to(ROOT).as_posix())
async def test_what_a_page_tells_people_to_type_works(path: Path, tmp_path: Path) -> None:
    no_curl = shutil.which("curl") is None
    left_out = 0
    async with opened(tmp_path) as page:
        for block in to_run(path):
            if no_curl and "curl" in block.text:
                left_out += 1
            else:
                await page.run(block)
    if left_out:
        pytest.skip(f"curl is missing: {left_out} blocks of {path.name} were not run")
