"""The search for the highest rate that keeps the promise. A state machine: rates go out, verdicts come in.

First the rate doubles until a run fails, or halves until one passes; then the interval between is halved. A pass is
only ever followed by a higher rate and a failure by a lower one, so noise costs precision and never the end.
"""

from __future__ import annotations

from pdserve.core.errors import ConfigError


class RateSearch:
    """`first` is tried first; `precision` is the width of the interval that is good enough, relative to its lower end;
    `most_runs` ends the search whatever is known by then."""

    def __init__(self, first: float, precision: float, most_runs: int) -> None:
        """Raises ConfigError."""
        if not (first > 0 and 0 < precision < 1 and most_runs >= 1):
            raise ConfigError(
                f"a search needs a rate above 0, a precision in (0, 1) and a run, not {first}, {precision}"
            )
        self._first, self._precision, self._most_runs = first, precision, most_runs
        self._runs = 0
        self.passed: float | None = None
        """The highest rate that kept the promise."""
        self.failed: float | None = None
        """The lowest one above it that did not."""

    @property
    def exact(self) -> bool:
        """Whether the two are as close as they should be."""
        if self.passed is None or self.failed is None:
            return False
        return self.failed - self.passed <= self._precision * self.passed * (1 + 1e-9)

    def next(self) -> float | None:
        """The rate to try; None at the end."""
        if self.exact or self._runs >= self._most_runs:
            return None
        if self.passed is None:
            return self._first if self.failed is None else self.failed / 2
        return 2 * self.passed if self.failed is None else (self.passed + self.failed) / 2

    def take(self, rate: float, kept: bool) -> None:
        """What became of the rate that `next` gave."""
        self._runs += 1
        if kept:
            self.passed = rate
        else:
            self.failed = rate
