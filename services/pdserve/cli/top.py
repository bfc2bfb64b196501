"""`pdserve top`: the fleet, live: latencies, queues, pools, KV memory and links."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.console import DEFAULT_TARGET, Target, run, stdout_console
from pdserve.cli.reach import DEFAULT_CONNECT_TIMEOUT, ConnectTimeout, router
from pdserve.core.errors import PdserveError

if TYPE_CHECKING:
    from pdserve.cli.view import View
    from pdserve.client import Client

CALL_TIMEOUT = 5.0  # seconds


def top(
    target: Target = DEFAULT_TARGET,
    interval: Annotated[float, typer.Option(min=0.1, max=60.0, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show one view and end; so does a pipe.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each view, a line each.")] = False,
    connect_timeout: ConnectTimeout = DEFAULT_CONNECT_TIMEOUT,
) -> None:
    """Watch a fleet: requests and latencies of the last minute as one router saw them; each worker's load, KV memory
    and links. q or Ctrl-C ends it."""
    live = sys.stdout.isatty() and not once
    if as_json:
        run(_print(target, connect_timeout, interval, once=once), interrupted=0)
    else:
        run((_live if live else _once)(target, connect_timeout, interval), interrupted=0)


async def look(client: Client, target: str, before: View | None) -> View:
    """One look at the fleet; `before` is the look that rates are told from."""
    from pdserve.cli.view import View

    fleet, stats = await asyncio.gather(client.fleet(CALL_TIMEOUT), client.stats(CALL_TIMEOUT))
    return View.after(before, target, time.time(), tuple(fleet), stats)


async def twice(client: Client, target: str, interval: float) -> View:
    """A look that has rates: they are told from one before it."""
    before = await look(client, target, None)
    await asyncio.sleep(interval)
    return await look(client, target, before)


async def _once(target: str, connect_timeout: float, interval: float) -> None:
    from pdserve.cli.dashboard import dashboard

    async with router(target, connect_timeout) as client:
        view = await twice(client, target, interval)
    console, ascii_only = stdout_console()
    console.print(dashboard(view, console.width, ascii_only=ascii_only))


async def _print(target: str, connect_timeout: float, interval: float, *, once: bool) -> None:
    """A line for each look."""
    async with router(target, connect_timeout) as client:
        view = await twice(client, target, interval)
        while True:
            typer.echo(json.dumps(dataclasses.asdict(view)))
            sys.stdout.flush()
            if once:
                return
            await asyncio.sleep(interval)
            view = await look(client, target, view)


async def _live(target: str, connect_timeout: float, interval: float) -> None:
    """On the whole terminal, until q. A router that does not answer is asked again; what it said last stays."""
    from rich.live import Live

    from pdserve.cli.dashboard import dashboard
    from pdserve.cli.view import waiting
    from pdserve.client import NO_RETRIES

    console, ascii_only = stdout_console()
    quit_key = asyncio.Event()
    async with router(target, connect_timeout, retry=NO_RETRIES) as client:
        view = await look(client, target, None)  # a wrong target is told as an error, before the screen is taken
        with _keys(quit_key), Live(console=console, screen=True, auto_refresh=False) as screen:
            while not quit_key.is_set():
                screen.update(dashboard(view, console.width, ascii_only=ascii_only), refresh=True)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval):
                        await quit_key.wait()
                try:
                    view = await look(client, target, view)
                except PdserveError as error:
                    view = waiting(view, str(error))


@contextlib.contextmanager
def _keys(quit_key: asyncio.Event) -> Iterator[None]:
    """Set `quit_key` when q is typed: keys are read as they are typed and not shown. The terminal is put back after."""
    if not sys.stdin.isatty():
        yield
        return
    import termios  # not everywhere, but where there is such a terminal
    import tty

    fd, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(fd)

    def typed() -> None:
        if sys.stdin.read(1) in ("q", "Q", ""):
            quit_key.set()

    tty.setcbreak(fd)
    loop.add_reader(fd, typed)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
