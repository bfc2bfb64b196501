"""An advice as rows of tables, and as one object."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from pdserve.simulator.advice import Advice, Question, Tried
from pdserve.simulator.advice_verdict import Side
from pdserve.simulator.report import Spread

LENGTHS = ("", "mean", "p50", "p90", "p99")
FLEETS = ("", "fleet", "how", "goodput", "for each GPU", "GPU-seconds a request", "a request costs")
OWN_RATE = ("as it arrives", "within targets", "workers needed")
VERSION = 1
FEW = 200  # requests


@dataclasses.dataclass(frozen=True, slots=True)
class Price:
    """`devices` are the GPUs of one worker, `gpu_hour` what one costs in any currency; None: nobody said."""

    devices: int = 1
    gpu_hour: float | None = None

    def of(self, gpu_seconds: float | None) -> float | None:
        """What a request costs that takes so much."""
        return None if gpu_seconds is None or self.gpu_hour is None else gpu_seconds * self.gpu_hour / 3600


def length_rows(advice: Advice) -> list[tuple[str, ...]]:
    """Cells in the order of LENGTHS."""

    def cells(name: str, spread: Spread) -> tuple[str, ...]:
        return (name, *(f"{value:,.0f}" for value in dataclasses.astuple(spread)))

    return [cells("prompt tokens", advice.load.prompt), cells("output tokens", advice.load.output)]


def load_rows(advice: Advice) -> list[tuple[str, str]]:
    """What else there is to say of the load: a name and a figure."""
    load, compute = advice.load, advice.compute
    batch = f" in a batch of {compute.batch}" if compute.batch else ""
    each = f"{1e3 * compute.prefill:.1f} ms of prefill and {1e3 * compute.decode:.1f} ms of decode{batch}"
    return [
        ("arrives", f"{load.requests} requests in {load.seconds:,.0f} s: {load.rate:.3g} a second"),
        ("burstiness", f"{load.burstiness:.2f} (1: at random)"),
        ("prompt tokens seen before", f"{load.repeated:.1%}"),
        ("a request computes", each),
        ("prefill to decode", f"{compute.ratio:.2f}" if math.isfinite(compute.ratio) else "nothing is decoded"),
        ("within targets on an idle worker", f"{advice.alone:.1%}"),
    ]


def fleet_rows(advice: Advice, price: Price) -> list[tuple[str, ...]]:
    """Cells in the order of FLEETS, the best of each ratio. "up to": it was only found to be no better than that."""
    best = dict[str, Tried]()
    for tried in advice.tried:
        known = best.setdefault(tried.candidate.ratio, tried)
        if (tried.goodput, tried.exact) > (known.goodput, known.exact):
            best[tried.candidate.ratio] = tried
    chosen = {side.candidate for side in _sides(advice)}
    return [_fleet_row(tried, price, tried.candidate in chosen) for tried in best.values()]


def _fleet_row(tried: Tried, price: Price, chosen: bool) -> tuple[str, ...]:
    candidate, gpus = tried.candidate, tried.candidate.workers * price.devices
    limit = "" if tried.exact else "up to "
    cells = ["*" if chosen else "", candidate.ratio, candidate.details, f"{limit}{tried.goodput:.3g}/s"]
    seconds = gpus / tried.goodput if tried.goodput and tried.exact else None
    cost = price.of(seconds)
    cells.append(f"{limit}{tried.goodput / gpus:.3g}/s")
    return (*cells, "-" if seconds is None else f"{seconds:.3g}", "-" if cost is None else f"{cost:.3g}")


def own_rate_rows(advice: Advice) -> list[tuple[str, ...]]:
    """Cells in the order of OWN_RATE."""
    return [
        (side.candidate.ratio, f"{side.attainment:.1%}", "too many" if side.needed is None else str(side.needed))
        for side in _sides(advice)
    ]


def doubts(advice: Advice) -> list[str]:
    """What makes the figures less sure than they look."""
    if advice.load.requests < FEW:
        return [f"{advice.load.requests} requests are few: {FEW} and more tell fleets apart"]
    return []


def as_dict(advice: Advice, question: Question, price: Price) -> dict[str, Any]:
    """For JSON. Seconds, requests a second; a currency is whatever the price was in."""
    verdict, compute = advice.verdict, advice.compute
    return {
        "pdserve_advice": VERSION,
        "disaggregate": verdict.disaggregate,
        "why": verdict.why.value,
        "sentence": verdict.sentence,
        "ratio": advice.split.candidate.ratio if advice.split else None,
        "gain": verdict.margin,
        "margin": question.margin,
        "goal": question.goal,
        "workers": advice.workers,
        "gpus": advice.workers * price.devices,
        "load": dataclasses.asdict(advice.load),
        "compute": {
            "prefill_seconds": compute.prefill,
            "decode_seconds": compute.decode,
            "batch": compute.batch,
            "ratio": compute.ratio if math.isfinite(compute.ratio) else None,
        },
        "alone": advice.alone,
        "colocated": _side(advice.colocated, price),
        "split": _side(advice.split, price),
        "tried": [
            {**dataclasses.asdict(tried.candidate), "goodput": tried.goodput, "exact": tried.exact}
            for tried in advice.tried
        ],
        "simulations": advice.simulations,
    }


def _side(side: Side | None, price: Price) -> dict[str, Any] | None:
    if side is None:
        return None
    gpu_seconds, gpus = side.gpu_seconds(price.devices), side.candidate.workers * price.devices
    return {
        **dataclasses.asdict(side.candidate),
        "goodput": side.goodput,
        "goodput_per_gpu": side.goodput / gpus,
        "gpu_seconds_per_request": gpu_seconds,
        "cost_per_request": price.of(gpu_seconds),
        "attainment": side.attainment,
        "workers_needed": side.needed,
    }


def _sides(advice: Advice) -> Iterable[Side]:
    return [side for side in (advice.colocated, advice.split) if side is not None]
