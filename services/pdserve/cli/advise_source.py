"""What `pdserve advise` is to judge: requests from a file, or from a suite that runs."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pdserve.cli.reach import router
from pdserve.core.errors import ConfigError, Unavailable
from pdserve.policy.estimate import Speed
from pdserve.simulator.advice_drawn import Histogram, drawn
from pdserve.simulator.cost_parts import RooflinePart
from pdserve.simulator.ground import Ground
from pdserve.simulator.measured import mean_of
from pdserve.simulator.plan import FleetPlan
from pdserve.simulator.workload import Arrival, read_trace

if TYPE_CHECKING:
    from pdserve.client import FleetWorker, RequestSummary, Stats

FEWEST = 20  # requests of a suite that tell anything
REMEMBERED = 1 << 20  # more than any router keeps
FETCH_TIMEOUT = 10.0  # seconds
PROMPTS, OUTPUTS = "request_prompt_tokens", "request_generation_tokens"
_PREFIXES = ("pdserve_", "vllm:")  # who counts them by these names


@dataclass(frozen=True, slots=True)
class Source:
    """`arrivals` in order, called `name`. As far as the source tells, `defaults` are single values of a plan, `speeds`
    what workers of which role learned of their steps; `notes` say what it does not tell."""

    name: str
    arrivals: Sequence[Arrival]
    notes: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    speeds: Sequence[tuple[str, Speed]] = ()


def from_file(path: Path, requests: int) -> Source:
    """The first `requests` of a trace or a bench's result. Raises ConfigError."""
    arrivals = read_trace(path)
    taken = arrivals[:requests]
    notes = [f"only the first {len(taken)} of {len(arrivals)} requests: --requests for more"] * (taken != arrivals)
    blocks = {arrival.block_tokens for arrival in taken if arrival.block_ids}
    # Blocks as large as the trace's: smaller ones are no other prefixes, only more of them.
    defaults = {"fleet.block_size": blocks.pop()} if len(blocks) == 1 else {}
    return Source(path.name, taken, tuple(notes), defaults)


async def from_router(target: str, model: str | None, requests: int, connect_timeout: float) -> Source:
    """The latest requests that the router at `target` remembers, and what its workers have learned of their speed.

    Raises ConfigError where those are too few, or of several models and none is named; Unavailable.
    """
    async with router(target, connect_timeout) as client:
        summaries, fleet, stats = await client.traces(REMEMBERED), await client.fleet(), await client.stats()
    return of_router(target, summaries, fleet, stats, model, requests)


def of_router(
    target: str,
    summaries: Sequence[RequestSummary],
    fleet: Sequence[FleetWorker],
    stats: Stats,
    model: str | None,
    requests: int,
) -> Source:
    """The latest `requests` of `summaries` that were answered. Raises ConfigError."""
    answered = [summary for summary in summaries if summary.finish_reason is not None]
    name = _one(target, {summary.model for summary in answered}, model)
    ours = sorted((summary for summary in answered if summary.model == name), key=lambda summary: summary.arrived_ns)
    ours = ours[-requests:]
    if len(ours) < FEWEST:
        raise ConfigError(
            f"{target} remembers {len(ours)} answered requests{f' for {name}' if name else ''}, and {FEWEST} are needed"
        )
    arrivals = [
        Arrival(
            (summary.arrived_ns - ours[0].arrived_ns) / 1e9,
            max(1, summary.usage.prompt_tokens),
            max(1, summary.usage.completion_tokens),
        )
        for summary in ours
    ]
    workers = [worker for worker in fleet if worker.model == name and worker.role in ("prefill", "decode")]
    defaults: dict[str, Any] = {"slo.ttft_ms": stats.ttft_target_ms, "slo.itl_ms": stats.itl_target_ms}
    defaults["slo.itl_percentile"] = stats.itl_target_percentile
    if weights := [worker.kv_token_bytes for worker in workers if worker.kv_token_bytes]:
        # All that a simulation by measured steps asks of a shape is what its KV weighs; as one layer, all of it is sent
        # when the prompt is through, since nobody tells how many there are.
        width = max(1, round(weights[0] / 4))
        defaults["model"] = {"parameters": 1, "layers": 1, "hidden": 1, "kv_width": width, "bytes": 2}
    if rates := [link.bytes_per_second for worker in workers for link in worker.links if link.bytes_per_second]:
        defaults["fleet.link"] = f"{median(rates) / 1e9:.6f}GB/s"
    notes = ("prefixes that prompts share are not known, and count as computed",)
    speeds = [(worker.role, worker.speed) for worker in workers]
    return Source(f"{name} at {target}", arrivals, notes, defaults, speeds)


async def from_metrics(
    url: str, model: str | None, rate: float | None, watch: float, requests: int, seed: int
) -> Source:
    """`requests` drawn from the histograms that `url` serves, at `rate`, else at the rate that is seen in `watch`
    seconds. Raises ConfigError, Unavailable."""
    began, text = time.monotonic(), await _fetch(url)
    prompts, outputs, name = histograms(text, url, model)
    if rate is None:
        await asyncio.sleep(watch)
        later, seconds = histograms(await _fetch(url), url, name)[0], time.monotonic() - began
        rate = (later.total - prompts.total) / seconds
        if rate <= 0:
            raise ConfigError(
                f"{url} counted no answered request within {seconds:.0f} s; say --rate, or a longer --watch"
            )
    notes = (
        f"drawn with seed {seed} from histograms of {prompts.total:.0f} requests: arrivals at random, lengths of "
        "prompts and answers independent of each other, no shared prefixes",
    )
    return Source(f"{name} at {url}", drawn(prompts, outputs, rate, requests, seed), notes)


def histograms(text: str, url: str, model: str | None) -> tuple[Histogram, Histogram, str]:
    """Of prompt and of output tokens, and the model's name, of what `url` answered. Raises ConfigError."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[str, list[tuple[float, float]]]] = {kind: defaultdict(list) for kind in (PROMPTS, OUTPUTS)}
    wanted = {f"{prefix}{kind}_bucket": kind for prefix in _PREFIXES for kind in found}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if kind := wanted.get(sample.name):
                    bound = float(sample.labels["le"])
                    found[kind][sample.labels.get("model_name", "")].append((bound, sample.value))
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{url} does not serve Prometheus metrics: {error}") from error
    if not all(found.values()):
        raise ConfigError(f"{url} has no {PROMPTS} and {OUTPUTS}, as a router's metrics do")
    told = {kind: {name: _uncumulated(buckets) for name, buckets in found[kind].items()} for kind in found}
    served = {name for name, histogram in told[PROMPTS].items() if histogram.total and name in told[OUTPUTS]}
    name = _one(url, served, model)
    if not served or told[PROMPTS][name].total < FEWEST:
        raise ConfigError(f"{url} counted fewer than {FEWEST} answered requests{f' for {name}' if name else ''}")
    return told[PROMPTS][name], told[OUTPUTS][name], name


def _uncumulated(buckets: Sequence[tuple[float, float]]) -> Histogram:
    """Prometheus counts everything up to a bound."""
    summed = dict[float, float]()
    for bound, count in buckets:  # series of one model that differ in other labels
        summed[bound] = summed.get(bound, 0.0) + count
    bounds = sorted(summed)
    totals = [0.0, *(summed[bound] for bound in bounds)]
    return Histogram(tuple(bounds), tuple(max(0.0, totals[i + 1] - totals[i]) for i in range(len(bounds))))


def _one(place: str, names: set[str], wanted: str | None) -> str:
    if wanted is not None and wanted not in names:
        raise ConfigError(f"--served-model {wanted}: {place} has answered for {', '.join(sorted(names)) or 'none'}")
    if wanted is None and len(names) > 1:
        raise ConfigError(f"{place} has answered for several models; say --served-model: {' or '.join(sorted(names))}")
    return wanted if wanted is not None else next(iter(names), "")


def compared(source: Source, ground: Ground) -> tuple[FleetPlan, int, str]:
    """The workers that fleets are made of, the GPUs of each, and what they are called. Raises ConfigError."""
    plan, said = ground.workers(), ground.model_fields_set
    name = ground.model if isinstance(ground.model, str) else "a model of its own"
    if "cost" not in said and source.speeds:
        return replace(plan, cost=mean_of(source.speeds, source.name)), 1, "workers as fast as its own"
    if isinstance(ground.cost, RooflinePart):
        if source.speeds and not isinstance(ground.model, str):
            raise ConfigError("--hardware needs --model here: a running suite does not tell the shape of its model")
        one = ground.cost.hardware if isinstance(ground.cost.hardware, str) else "hardware of its own"
        return plan, ground.cost.devices, f"workers of {ground.cost.devices} x {one} with {name}"
    return plan, 1, f"workers that were measured, with {name}"


async def _fetch(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--metrics is a URL such as http://127.0.0.1:9090/metrics, not {url}")

    def fetch() -> str:
        with urllib.request.urlopen(url, timeout=FETCH_TIMEOUT) as answer:
            text: str = answer.read().decode(errors="replace")
        return text

    try:
        return await asyncio.to_thread(fetch)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise Unavailable(f"{url} cannot be read: {reason}") from error
