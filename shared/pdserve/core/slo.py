"""Service levels: what a request was promised, and whether it was kept. Times are seconds.

Goodput counts the requests that met both targets. An average hides stalls, so the gaps between tokens are judged by a
percentile of each request's own gaps, never by their mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What became of the promise."""

    MET = "met"
    MISSED_TTFT = "missed_ttft"
    MISSED_ITL = "missed_itl"
    MISSED_BOTH = "missed_both"
    FAILED = "failed"  # no answer, or half of one, and the deployment is to blame


class Outcome(StrEnum):
    """How a request ended, as far as service levels care."""

    ANSWERED = "answered"
    CANCELLED = "cancelled"  # by its client
    EXPIRED = "expired"  # its deadline passed, or the router's limit
    REFUSED = "refused"  # it could not have been answered: an error of the client's
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SloTargets:
    """`ttft` bounds the time to first token; `itl` bounds `itl_percentile` (0 to 100) of a request's gaps."""

    ttft: float
    itl: float
    itl_percentile: float

    def __post_init__(self) -> None:
        if not (0 < self.ttft < math.inf and 0 < self.itl < math.inf and 0 < self.itl_percentile <= 100):
            raise ValueError(f"targets must be above 0, and the percentile at most 100: {self}")


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of `values` that `percent` of them do not exceed (nearest rank). Raises ValueError without any."""
    if not values:
        raise ValueError("no values, so no percentile")
    # Rounded first: 0.07 * 100 values is rank 7, and 7.000000000000001 in floating point.
    rank = math.ceil(round(percent / 100 * len(values), 9))
    return sorted(values)[min(len(values), max(1, rank)) - 1]


def judge(
    outcome: Outcome,
    waited: float,
    ttft: float | None,
    gaps: Sequence[float],
    targets: SloTargets,
    open_gap: float = 0.0,
) -> Verdict | None:
    """The verdict on a request that ended after `waited` seconds; `ttft` is None where no token came.

    `open_gap` is how long the next token had been waited for. It is one of the gaps where nobody waited for its end,
    and where it is too long already: a shorter one says nothing yet.

    None: it says nothing about the deployment. That is so for the client's errors, and for a request that was cancelled
    or expired while every target still held; one that ended so later, for having waited too long, has missed.
    """
    if outcome is Outcome.FAILED:
        return Verdict.FAILED
    if outcome is Outcome.REFUSED:
        return None
    unfinished = outcome in (Outcome.CANCELLED, Outcome.EXPIRED)
    if unfinished and open_gap > targets.itl:
        gaps = [*gaps, open_gap]
    late = (waited if ttft is None else ttft) > targets.ttft
    stalled = bool(gaps) and percentile(gaps, targets.itl_percentile) > targets.itl
    if late and stalled:
        return Verdict.MISSED_BOTH
    if late or stalled:
        return Verdict.MISSED_TTFT if late else Verdict.MISSED_ITL
    return None if unfinished else Verdict.MET
