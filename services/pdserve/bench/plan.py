"""What to measure, and what came of it, as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.bench.figures import Figures
from pdserve.bench.load import Load
from pdserve.bench.rates import RateSearch
from pdserve.bench.record import Record
from pdserve.bench.strain import Strain
from pdserve.core.slo import SloTargets


@dataclass(frozen=True, slots=True)
class Plan:
    """How to measure. `pids` are the target's processes where they are here; `vocab` and `tokenizer` say what prompts
    are made of where the target does not. `drop_long`: leave out requests that the model has no room for, rather than
    refuse the load."""

    load: Load
    targets: SloTargets
    seed: int = 0
    warmup: int = 8
    timeout: float = 600.0
    gpus: float | None = None
    cores: float | None = None
    pids: tuple[int, ...] = ()
    vocab: int | None = None
    tokenizer: Path | None = None
    drop_long: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: its load and seed, what came of each request, and the figures, or why there are none."""

    load: Load
    seed: int
    records: Sequence[Record]
    strain: Strain
    figures: Figures | None
    refused: str | None

    def summary(self) -> dict[str, Any]:
        """Without the requests."""
        outcome = {"figures": self.figures.as_dict()} if self.figures else {"refused": self.refused}
        return {"rate": self.load.rate, "seed": self.seed, "client": self.strain.as_dict(), **outcome}


@dataclass(frozen=True, slots=True)
class Search:
    """A search for the highest rate at an attainment: all its runs, and why it ended before it was exact."""

    attainment: float
    precision: float
    runs: Sequence[Measured]
    state: RateSearch
    ended_early: str | None

    def best(self) -> Measured | None:
        """The run at the highest rate that kept the promise."""
        return next((run for run in reversed(self.runs) if run.figures and run.load.rate == self.state.passed), None)

    def as_dict(self) -> dict[str, Any]:
        return {
            "attainment": self.attainment,
            "highest_rate": self.state.passed,
            "lowest_failing_rate": self.state.failed,
            "precision": self.precision,
            "exact": self.state.exact,
            "ended_early": self.ended_early,
            "runs": [run.summary() for run in self.runs],
        }
