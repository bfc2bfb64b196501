"""How far a benchmark is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from pdserve.bench.load import Load
from pdserve.bench.plan import Plan
from pdserve.bench.session import Bench
from pdserve.cli.bench_progress import shown
from pdserve.core.slo import SloTargets
from tests.unit.bench.targets import Reciter

PLAN = Plan(Load(requests=6, rate=500.0, mix=((0.5, 9, 1), (0.5, 7, 1))), SloTargets(60.0, 60.0, 99.0), warmup=0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


async def measure(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is said while a target refuses some requests in two runs."""
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with shown() as progress:
        bench = Bench(Reciter(refused=7), PLAN, progress)
        await bench.prepare()
        for _ in range(2):
            progress.told(await bench.measure())
    return stream.getvalue()


async def test_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    said = await measure(io.StringIO(), monkeypatch)
    first, kept, *again = said.splitlines()
    assert first == "rate 500: 6 requests" and again == [first, kept]
    assert kept.startswith("note: rate 500, seed 0: ") and kept.endswith("kept the targets")


async def test_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the run that goes on, with what failed; what was said stays above it."""
    said = await measure(Terminal(), monkeypatch)
    assert "6/6" in said and "failed" in said
    assert said.count("rate 500, seed 0: ") == 2
