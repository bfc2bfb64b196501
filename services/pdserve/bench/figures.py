"""What a run came to. Pure arithmetic over what the client saw.

Attainment is of all requests that were offered, errors and refusals included. Goodput is those within both targets, a
second of the run (from its beginning to its last answer). Latencies are of answered requests, and every gap counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pdserve.bench.record import Record
from pdserve.client import Stages
from pdserve.core.quantiles import Quantiles, quantiles_of
from pdserve.core.slo import SloTargets, Verdict

OUTSIDE = "outside"
_FIRST_TOKEN = ("queue_ms", "reserve_ms", "prefill_ms")


@dataclass(frozen=True, slots=True)
class Means:
    """What the target runs on. `gpus` and `cores` are held for the whole run; `cpu_seconds` is what its processes used
    in it. None: nobody said."""

    gpus: float | None = None
    cores: float | None = None
    cpu_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """Latencies in ms, rates a second of the run. `errors` are counted by code, `verdicts` by name.

    GPU- and core-seconds a request are those held (number times duration) for each answered request; `cpu_seconds` is
    what was used. `stages` are a pdserve router's; "outside" is what else the client saw of the time to first token:
    network, both sides' queues, lateness. `assumed_tokens` came in messages that do not say how many they hold, beyond
    the one that each was taken for: their gaps are missing.
    """

    requests: int
    answered: int
    errors: dict[str, int]
    verdicts: dict[str, int]
    seconds: float
    offered_per_second: float
    answered_per_second: float
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    attainment: float
    goodput: float
    goodput_per_gpu: float | None
    goodput_per_core: float | None
    gpu_seconds_per_request: float | None
    core_seconds_per_request: float | None
    cpu_seconds_per_request: float | None
    ttft_ms: Quantiles
    itl_ms: Quantiles
    tpot_ms: Quantiles
    e2e_ms: Quantiles
    stages_ms: dict[str, Quantiles]
    cached_share: float | None
    replays: int
    assumed_tokens: int

    @classmethod
    def of(cls, records: Sequence[Record], seconds: float, targets: SloTargets, means: Means) -> Figures:
        """Of a run with at least one request that took `seconds`."""
        answered = [record for record in records if record.error is None]
        verdicts = Counter(record.verdict(targets) for record in records)
        kept = verdicts[Verdict.MET] / seconds
        last = max(record.at for record in records)
        told = [record.told for record in answered if record.told is not None]
        return cls(
            requests=len(records),
            answered=len(answered),
            errors=dict(Counter(record.error.partition(":")[0] for record in records if record.error)),
            verdicts={verdict.value: count for verdict, count in sorted(verdicts.items())},
            seconds=seconds,
            # n arrivals span n - 1 gaps.
            offered_per_second=(len(records) - 1) / last if last > 0 else len(records) / seconds,
            answered_per_second=len(answered) / seconds,
            prompt_tokens_per_second=sum(record.arrival.prompt for record in answered) / seconds,
            output_tokens_per_second=sum(record.output for record in answered) / seconds,
            attainment=verdicts[Verdict.MET] / len(records),
            goodput=kept,
            goodput_per_gpu=_each(kept, means.gpus),
            goodput_per_core=_each(kept, means.cores),
            gpu_seconds_per_request=_each(_held(means.gpus, seconds), len(answered)),
            core_seconds_per_request=_each(_held(means.cores, seconds), len(answered)),
            cpu_seconds_per_request=_each(means.cpu_seconds, len(answered)),
            ttft_ms=_ms(record.ttft for record in answered),
            itl_ms=_ms(gap for record in answered for gap in record.gaps),
            tpot_ms=_ms(record.tpot for record in answered),
            e2e_ms=_ms(record.e2e for record in answered),
            stages_ms=_stages(answered),
            cached_share=_each(sum(one.cached_tokens for one in told), sum(one.prompt_tokens for one in told)),
            replays=sum(one.replays for one in told),
            assumed_tokens=sum(record.output - record.tokens for record in answered),
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _stages(records: Iterable[Record]) -> dict[str, Quantiles]:
    """Of those whose server told them, by name; what the client waited for beyond them is OUTSIDE."""
    told = [(record, record.told.stages) for record in records if record.told and record.told.stages]
    if not told:
        return {}
    names = Stages.__dataclass_fields__
    found = {name.removesuffix("_ms"): quantiles_of([getattr(stages, name) for _, stages in told]) for name in names}
    rest = [1e3 * (record.ttft or 0.0) - sum(getattr(stages, name) for name in _FIRST_TOKEN) for record, stages in told]
    return {**found, OUTSIDE: quantiles_of([max(0.0, value) for value in rest])}


def _ms(seconds: Iterable[float | None]) -> Quantiles:
    return quantiles_of([1e3 * value for value in seconds if value is not None])


def _held(count: float | None, seconds: float) -> float | None:
    return None if count is None else count * seconds


def _each(total: float | None, count: float | None) -> float | None:
    return None if total is None or not count else total / count
