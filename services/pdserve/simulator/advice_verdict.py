"""Disaggregate or not: the answer, as a function of what was found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pdserve.simulator.advice_trials import Candidate

SMALLEST_SPLIT = 2  # workers: one of each


class Why(StrEnum):
    """What the answer rests on."""

    IMPOSSIBLE = "impossible"  # the targets cannot be kept, however many workers there are
    LOW_LOAD = "low_load"  # what arrives needs no more co-located workers than the smallest split fleet has
    WORSE = "worse"  # co-located workers serve more by the margin
    TIE = "tie"  # neither serves more by the margin
    BETTER = "better"  # disaggregated workers serve more by the margin


@dataclass(frozen=True, slots=True)
class Side:
    """The best fleet of one kind. `goodput` is the highest rate in requests a second at which it keeps the targets,
    `attainment` the share of requests that keep them at the rate of the load itself, `needed` how many workers of this
    kind would be enough for that rate (None: more than were tried)."""

    candidate: Candidate
    goodput: float
    attainment: float
    needed: int | None

    def gpu_seconds(self, devices: int) -> float | None:
        """Of a request at `goodput`, on workers of `devices` GPUs each; None where nothing is served."""
        return self.candidate.workers * devices / self.goodput if self.goodput else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """`margin` is how much more the disaggregated fleet serves (0.2: a fifth more, below 0: less); None where the
    co-located one serves nothing."""

    disaggregate: bool
    why: Why
    margin: float | None
    sentence: str


def decide(colocated: Side, split: Side, rate: float, margin: float) -> Verdict:
    """Of two fleets with equally many workers, for a load of `rate` requests a second. A gain of `margin` or less,
    either way, is a tie, and a tie means no: more parts have to be worth it."""
    serves, instead = f"{split.goodput:.3g}", f"{colocated.goodput:.3g}"
    name, workers = split.candidate.ratio, split.candidate.workers
    if not colocated.goodput:
        if not split.goodput:
            return Verdict(False, Why.IMPOSSIBLE, None, "no: neither kind of fleet keeps the targets at any rate")
        gain, compared = None, f"{workers} workers serve {serves} requests/s within the targets, co-located ones none"
    else:
        gain = split.goodput / colocated.goodput - 1
        more = f"{abs(gain):.0%} {'more' if gain >= 0 else 'less'}"
        compared = f"{workers} workers serve {serves} requests/s within the targets, co-located {instead}: {more}"
    if colocated.needed is not None and colocated.needed <= SMALLEST_SPLIT:
        enough = "one co-located worker is" if colocated.needed == 1 else f"{colocated.needed} co-located workers are"
        low = f"no: {enough} enough for {rate:.3g} requests/s, and disaggregation cannot do with fewer than two"
        return Verdict(False, Why.LOW_LOAD, gain, f"{low}. At full load, as {name}, {compared}")
    if gain is not None and split.goodput * (1 + margin) < colocated.goodput:
        return Verdict(False, Why.WORSE, gain, f"no: as {name}, {compared}")
    if gain is not None and split.goodput <= colocated.goodput * (1 + margin):
        return Verdict(False, Why.TIE, gain, f"no, a tie: as {name}, {compared}, and up to {margin:.0%} is a tie")
    return Verdict(True, Why.BETTER, gain, f"yes, as {name}: {compared}")


def impossible(alone: float, goal: float) -> Verdict:
    """Where only the share `alone` of requests keep the targets on an idle worker, below `goal`."""
    return Verdict(
        False,
        Why.IMPOSSIBLE,
        None,
        f"no: only {alone:.1%} of requests keep the targets even on an idle worker, and {goal:.0%} are wanted. Faster "
        "workers or other targets would help; disaggregation does not",
    )
