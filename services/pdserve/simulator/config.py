"""What to simulate, as a YAML file says it. An unknown or contradictory key is an error that names it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from pdserve.core.errors import ConfigError
from pdserve.core.fabric import parse_bandwidth
from pdserve.core.layout import KVLayout
from pdserve.policy.routing import choose_pair
from pdserve.simulator import baselines
from pdserve.simulator.costs import MOONCAKE, CostModel, Fitted, Hardware, ModelShape, Roofline
from pdserve.simulator.report import Slo
from pdserve.simulator.simulation import FleetPlan, Outage, Policy
from pdserve.simulator.worker import WorkerLimits
from pdserve.simulator.workload import Arrival, Lengths, Synthetic, read_trace, repeat, scale

# By the makers' data sheets: dense 16-bit FLOPs and memory bandwidth of one accelerator.
HARDWARE = {
    "a100": Hardware(312e12, 2.039e12),
    "h100": Hardware(989e12, 3.35e12),
    "h200": Hardware(989e12, 4.8e12),
    "l40s": Hardware(362e12, 0.864e12),
}
MODELS = {
    "llama3-8b": ModelShape(8.0e9, 32, 4096, 1024),
    "llama3-70b": ModelShape(70.6e9, 80, 8192, 1024),
    "opt-13b": ModelShape(13.0e9, 40, 5120, 5120),
    "qwen2.5-32b": ModelShape(32.8e9, 64, 5120, 1024),
}
_BITS = {1: "int8", 2: "bfloat16", 4: "float32"}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _bandwidth(text: str) -> str:
    parse_bandwidth(text)
    return text


class OutagePart(_Part):
    worker: str = Field(description='as "decode-0"')
    at: float = Field(ge=0, description="seconds from the beginning")
    seconds: float = Field(gt=0)


class FleetPart(_Part):
    """How many workers, and what each has."""

    prefill: int = Field(0, ge=0)
    decode: int = Field(0, ge=0)
    colocated: int = Field(0, ge=0, description="workers that do both, instead of prefill and decode ones")
    block_size: int = Field(16, ge=1, description="tokens in a KV block; must divide the workload's")
    kv_tokens: int = Field(500_000, ge=1, description="tokens that one worker has KV memory for")
    max_num_seqs: int = Field(256, ge=1)
    max_num_batched_tokens: int = Field(2048, ge=1)
    lookahead_tokens: int = Field(128, ge=0)
    whole_prompts: bool = Field(False, description="no chunked prefill: prompts stop decoding meanwhile")
    link: Annotated[str, AfterValidator(_bandwidth)] = Field("200Gbit/s", description="one worker's network")
    link_latency_ms: float = Field(1.0, ge=0)
    speeds: dict[str, float] = Field(default_factory=dict, description="worker: times as fast as the cost model says")
    outages: list[OutagePart] = Field(default_factory=list)


class FittedPart(_Part):
    """Coefficients in ms: constant, per token, per token squared; constant, per context token, per answer."""

    prefill: tuple[float, float, float]
    decode: tuple[float, float, float]


class RooflinePart(_Part):
    hardware: Literal["a100", "h100", "h200", "l40s"]
    devices: int = Field(default=1, ge=1, description="of one worker, in tensor parallel")


class SyntheticPart(_Part):
    requests: int = Field(1000, ge=1)
    rate: float = Field(gt=0, description="conversations that begin each second")
    prompt: float = Field(gt=0, description="mean tokens of a turn")
    prompt_cv: float = Field(0.0, ge=0)
    output: float = Field(gt=0)
    output_cv: float = Field(0.0, ge=0)
    burstiness: float = Field(1.0, gt=0, description="coefficient of variation of the gaps; 1: Poisson")
    turns: int = Field(1, ge=1)
    think: float = Field(10.0, gt=0, description="mean seconds before the next turn")
    system: int = Field(0, ge=0, description="tokens that all prompts begin with")


class WorkloadPart(_Part):
    """A trace, replayed `rate` times as fast and in `copies` side by side, or a synthetic stream."""

    trace: Path | None = None
    rate: float = Field(1.0, gt=0)
    copies: int = Field(1, ge=1)
    limit: int | None = Field(None, ge=1, description="only so many of its requests")
    synthetic: SyntheticPart | None = None

    @model_validator(mode="after")
    def _one(self) -> WorkloadPart:
        if (self.trace is None) == (self.synthetic is None):
            raise ValueError("a workload is either a trace or synthetic")
        return self


class SloPart(_Part):
    ttft_ms: float = Field(default=500.0, gt=0)
    itl_ms: float = Field(default=50.0, gt=0)
    itl_percentile: float = Field(default=99.0, gt=0, le=100, description="of a request's own gaps")


class SimulationSettings(_Part):
    """One simulation."""

    fleet: FleetPart
    workload: WorkloadPart
    model: Literal["llama3-8b", "llama3-70b", "opt-13b", "qwen2.5-32b"] = "llama3-8b"
    cost: Literal["mooncake"] | FittedPart | RooflinePart = RooflinePart(hardware="h100")
    policy: Literal["default", "kv-aware", "load-balance", "random"] = "default"
    slo: SloPart = SloPart()
    seed: int = 0

    @classmethod
    def load(cls, path: Path, changes: Mapping[str, Any] | None = None) -> SimulationSettings:
        """From a YAML file, with single values replaced: {"fleet.prefill": 4}. Raises ConfigError, a line a problem."""
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not YAML: {error}") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{path} must hold keys such as fleet and workload")
        for name, value in (changes or {}).items():
            _set(content, name.split("."), value)
        try:
            settings = cls.model_validate(content)
        except ValidationError as error:
            lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise ConfigError("\n".join([f"{path} cannot be simulated:", *lines])) from error
        settings.plan().check()
        return settings

    def shape(self) -> ModelShape:
        return MODELS[self.model]

    def cost_model(self) -> CostModel:
        match self.cost:
            case FittedPart():
                return Fitted(self.cost.prefill, self.cost.decode)
            case RooflinePart():
                one = HARDWARE[self.cost.hardware]
                together = Hardware(one.flops * self.cost.devices, one.memory * self.cost.devices)
                return Roofline(together, self.shape())
            case _:
                return MOONCAKE

    def plan(self) -> FleetPlan:
        fleet, shape = self.fleet, self.shape()
        limits = WorkerLimits(
            total_blocks=max(1, fleet.kv_tokens // fleet.block_size),
            max_num_seqs=fleet.max_num_seqs,
            max_num_batched_tokens=fleet.max_num_batched_tokens,
            lookahead_tokens=fleet.lookahead_tokens,
            whole_prompts=fleet.whole_prompts,
        )
        layout = KVLayout(fleet.block_size, shape.layers, shape.kv_width // 128, 128, _BITS[shape.bytes], bytes(16))
        return FleetPlan(
            layout=layout,
            cost=self.cost_model(),
            prefill=fleet.prefill,
            decode=fleet.decode,
            colocated=fleet.colocated,
            prefill_limits=limits,
            decode_limits=limits,
            link_bytes_per_second=parse_bandwidth(fleet.link),
            link_latency=fleet.link_latency_ms / 1e3,
            speeds=fleet.speeds,
            outages=tuple(Outage(outage.at, outage.worker, outage.seconds) for outage in fleet.outages),
        )

    def arrivals(self) -> list[Arrival]:
        """The requests, in order of arrival. Raises ConfigError."""
        load = self.workload
        if load.trace is not None:
            return repeat(scale(read_trace(load.trace), load.rate, load.limit), load.copies)
        assert load.synthetic is not None
        part = load.synthetic
        stream = Synthetic(
            rate=part.rate * load.rate,
            prompt=Lengths(part.prompt, part.prompt_cv),
            output=Lengths(part.output, part.output_cv),
            burstiness=part.burstiness,
            turns=part.turns,
            think=part.think,
            system=part.system,
            block_tokens=self.fleet.block_size,
        )
        return repeat(stream.arrivals(min(part.requests, load.limit or part.requests), self.seed), load.copies)

    def routing(self) -> Policy:
        match self.policy:
            case "default":
                return choose_pair
            case "kv-aware":
                return baselines.policy(baselines.kv_aware(self.cost_model()))
            case "load-balance":
                return baselines.policy(baselines.load_balance)
            case _:
                return baselines.policy(baselines.random_choice(random.Random(self.seed)))

    def targets(self) -> Slo:
        return Slo(self.slo.ttft_ms / 1e3, self.slo.itl_ms / 1e3, self.slo.itl_percentile / 100)


def _set(content: dict[str, Any], names: list[str], value: Any) -> None:
    for name in names[:-1]:
        content = content.setdefault(name, {})
        if not isinstance(content, dict):
            raise ConfigError(f"{name} holds a value, not keys")
    content[names[-1]] = value


def parse_changes(texts: Iterable[str]) -> dict[str, Any]:
    """{"fleet.prefill": 4} of ["fleet.prefill=4"]; values are YAML. Raises ConfigError."""
    changes = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"{text!r} is not KEY=VALUE, such as fleet.prefill=4")
        try:
            changes[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"{name}: {value!r} is not YAML") from error
    return changes
