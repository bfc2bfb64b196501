"""What every command shares: running a coroutine, ending on signals, one-line errors, sizes, progress of a start."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from pdserve.core.errors import ConfigError, PdserveError
from pdserve.rpc.endpoint import parse_endpoint

if TYPE_CHECKING:
    from rich.console import Console

    from pdserve.client import Retry
    from pdserve.launch import LaunchEvent


def _check_target(text: str) -> str:
    try:
        parse_endpoint(text)
    except ConfigError as error:
        raise typer.BadParameter(f"{error}, such as {DEFAULT_TARGET}") from None
    return text


Target = Annotated[str, typer.Option(envvar="PDSERVE_TARGET", callback=_check_target, help="The router, as host:port.")]
DEFAULT_TARGET = "127.0.0.1:50051"
PIPE_WIDTH = 160  # a pipe has no width to keep to
INTERRUPTED = 130  # what shells expect after Ctrl-C
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def fail(message: str, code: int = 1) -> NoReturn:
    """Print one clear error to stderr and end with `code`."""
    typer.echo(f"pdserve: {message}", err=True)
    raise typer.Exit(code)


def say_retry(retry: Retry) -> None:
    """Say on stderr that a call failed and will be made again: for `Client(on_retry=...)`."""
    typer.echo(f"pdserve: {retry.error}; trying again in {retry.delay:.1f} s", err=True)


def run(
    main: Coroutine[Any, Any, None],
    *,
    interrupted: int = INTERRUPTED,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Run a command to its end. Ctrl-C and SIGTERM cancel it, so that every `async with` in it is left in order.

    On asyncio's own loop, or the one that `loop_factory` makes.

    Ends the program with code 1 on a PdserveError, 2 on a ConfigError, `interrupted` after a signal.
    """

    async def until_signalled() -> bool:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(main)
        stopped = False

        def stop() -> None:
            nonlocal stopped
            stopped = True
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        try:
            await task
        except asyncio.CancelledError:
            if not stopped:
                raise
        return stopped

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            stopped = runner.run(until_signalled())
        if stopped:
            raise typer.Exit(interrupted)
    except ConfigError as error:
        fail(str(error), code=2)
    except PdserveError as error:
        fail(_plainly(str(error)))


def _plainly(message: str) -> str:
    """What grpc says, with what it means for whoever typed a command."""
    hints = {
        "Expected SETTINGS frame": "what answers there is no gRPC service; the gateway's port, perhaps?",
        "CERTIFICATE_VERIFY_FAILED": "its certificate is by no authority in --tls-ca-file, or not for that host",
        "WRONG_VERSION_NUMBER": "what answers there speaks no TLS; leave --tls-ca-file out?",
        "failed to connect .*Socket closed": "it hangs up; does it want TLS (--tls-ca-file), or a certificate?",
        "no API key": "PDSERVE_API_KEY has this command's key",
        "failed to connect to all addresses": "nothing answers there; does `pdserve serve` run, and is --target right?",
        "Method not found": "what answers there is no router",
        "errors resolving": "--target is host:port, such as 127.0.0.1:50051",
        "Misformatted domain name": "--target is host:port, such as 127.0.0.1:50051",
    }
    return next((f"{hint} ({message})" for sign, hint in hints.items() if re.search(sign, message)), message)


def parse_size(text: str | None) -> int | None:
    """Bytes of "1073741824", "512MiB", "4GiB" or "2GB". Raises typer.BadParameter."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if not match:
        raise typer.BadParameter(f"{text!r} is not a size such as 512MiB or 4GiB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def show_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Collection[int],
    whole: Collection[int] = (),
) -> None:
    """Print a table to stdout. Columns at positions `numbers` are flush right; these and those at `whole`, which people
    copy, are never broken; others fold where a terminal is narrow. Lines drawn in ASCII where the output is no
    terminal."""
    from rich.box import ASCII, SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    terminal = Console().is_terminal
    console = Console() if terminal else Console(width=PIPE_WIDTH)
    box, padding = (SIMPLE_HEAD, (0, 1, 0, 0)) if terminal else (ASCII, (0, 1, 0, 1))
    table = Table(title=escape(title) or None, title_justify="left", box=box, padding=padding)
    for index, name in enumerate(columns):
        number = index in numbers
        unbroken = number or index in whole
        table.add_column(name, justify="right" if number else "left", no_wrap=unbroken, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)


def stdout_console() -> tuple[Console, bool]:
    """stdout for rich, as wide as the terminal (or PIPE_WIDTH), and whether to keep to ASCII there."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        return Console(width=PIPE_WIDTH, highlight=False), True
    return console, console.options.ascii_only


@contextlib.contextmanager
def start_progress() -> Iterator[Callable[[LaunchEvent], None]]:
    """Show a suite's start on stderr: bars on a terminal, else one line for each service that is ready."""
    if not sys.stderr.isatty():
        yield _plain
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<16}"), BarColumn(), TextColumn("{task.fields[stage]:<28}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        tasks: dict[str, Any] = {}

        def show(event: LaunchEvent) -> None:
            if event.service not in tasks:
                tasks[event.service] = progress.add_task(event.service, total=1.0, stage="")
            task = tasks[event.service]
            if event.kind == "progress":
                progress.update(task, completed=event.done, stage=event.stage)
            elif event.kind == "ready":
                progress.update(task, completed=1.0, stage="ready")
            elif event.kind in ("failed", "exited"):
                progress.update(task, stage=event.kind)

        yield show


def _plain(event: LaunchEvent) -> None:
    if event.kind == "ready":
        typer.echo(f"{event.service} ready", err=True)


@contextlib.contextmanager
def fetch_progress(name: str) -> Iterator[Callable[[str], None]]:
    """Show the fetching of a model on stderr: a moving bar with its stage on a terminal, else one line a stage."""
    if not sys.stderr.isatty():
        yield lambda stage: typer.echo(f"{name}: {stage}", err=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=None, visible=False)
        yield lambda stage: progress.update(task, description=f"{name}: {stage}", visible=True)
