"""How far a benchmark is, on stderr: a bar on a terminal, else a line a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from pdserve.bench.plan import Measured
from pdserve.bench.record import Record
from pdserve.bench.session import Progress


class Lines(Progress):
    """A line for what begins, and for each run of a search."""

    def begin(self, name: str, requests: int) -> None:
        typer.echo(f"{name}: {requests} requests", err=True)

    def note(self, text: str) -> None:
        typer.echo(f"note: {text}", err=True)

    def told(self, run: Measured) -> None:
        """A run of a search has ended."""
        kept = f"{run.figures.attainment:.1%} kept the targets" if run.figures else run.refused
        self.note(f"rate {run.load.rate:g}, seed {run.seed}: {kept}")


class Bar(Lines):
    """A bar of the run that goes on, above which the lines stay."""

    def __init__(self, bars: Any) -> None:
        self._bars, self._task, self._failed = bars, None, 0

    def begin(self, name: str, requests: int) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._failed = 0
        self._task = self._bars.add_task(name, total=requests, failed="")

    def ended(self, record: Record) -> None:
        self._failed += record.error is not None
        self._bars.update(self._task, advance=1, failed=f"{self._failed} failed" if self._failed else "")

    def note(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False)


@contextmanager
def shown() -> Iterator[Lines]:
    """Show it while this is entered."""
    if not sys.stderr.isatty():
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    failed, console = TextColumn("{task.fields[failed]}"), Console(stderr=True)
    # Drawn seldom: drawing takes the client's time.
    with Bars(*columns, failed, console=console, transient=True, refresh_per_second=2) as bars:
        yield Bar(bars)
