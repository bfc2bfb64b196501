"""What to simulate, as a YAML file says it. An unknown or contradictory key is an error that names it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from pdserve.core.errors import ConfigError
from pdserve.core.fabric import parse_bandwidth
from pdserve.core.layout import KVLayout
from pdserve.core.slo import SloTargets
from pdserve.policy.routing import choose_pair
from pdserve.simulator import baselines, flags
from pdserve.simulator.cost_parts import KINDS, CostKey, ModelKey, RooflinePart, cost_model, model_shape
from pdserve.simulator.costs import CostModel, ModelShape
from pdserve.simulator.flags import Flags
from pdserve.simulator.parts import FleetPart, Part, SloPart, WorkloadPart
from pdserve.simulator.plan import Fetch, FleetPlan, Outage, Policy, Reject, WorkerLimits
from pdserve.simulator.problems import sentences
from pdserve.simulator.workload import Arrival, merge

NO_PLAN = (
    "give a file, or flags for workers (--prefill and --decode, or --colocated) and for what arrives (--trace, or "
    "--prompt-tokens, --output-tokens and --rate)"
)
_DTYPES = {2: "bfloat16", 4: "float32"}
_REJECT = {"none": Reject.NEVER, "current": Reject.CURRENT, "predicted": Reject.PREDICTED}


class SimulationSettings(Part):
    """One simulation."""

    fleet: FleetPart
    workload: WorkloadPart
    also: list[WorkloadPart] = Field(default_factory=list, description="more of what arrives, beside it")
    model: ModelKey = Field(default="llama3-8b", description="a name, or its figures")
    cost: CostKey = Field(default=RooflinePart(hardware="h100"), description="how long a step takes")
    policy: Literal["default", "kv-aware-global", "kv-aware", "load-balance", "random"] = Field(
        default="default", description="what the router runs, or one to compare it with"
    )
    admission: Literal["none", "current", "predicted"] = Field(
        default="none",
        description="turn away what cannot be served within the targets, by the load now or when its prompt is through",
    )
    slo: SloPart = SloPart()
    seed: int = Field(default=0, description="of synthetic streams and random policies")

    @classmethod
    def load(
        cls, path: Path | None, changes: Mapping[str, Any] | None = None, said: Flags | None = None
    ) -> SimulationSettings:
        """From a YAML file if any, with flags over it, and single values over both: {"fleet.prefill": 4}.

        Raises ConfigError, a line a problem.
        """
        content = _read(path) if path else {}
        if said is not None:
            flags.apply(said, content)
        flags.put(content, changes or {})
        if path is None and not {"fleet", "workload"} <= content.keys():
            raise ConfigError(NO_PLAN)
        try:
            settings = cls.model_validate(content)
        except ValidationError as error:
            place = f"{path} cannot be simulated" if path else "this cannot be simulated"
            raise ConfigError("\n  ".join([f"{place}:", *sentences(error, cls, KINDS)])) from error
        settings.plan().check()
        return settings

    def shape(self) -> ModelShape:
        return model_shape(self.model)

    def cost_model(self) -> CostModel:
        """Raises ConfigError for a file that does not hold it."""
        return cost_model(self.cost, self.shape())

    def plan(self) -> FleetPlan:
        """Raises ConfigError."""
        if self.admission != "none" and not self.slo.stated:
            raise ConfigError("admission: goes by what requests ask for; say slo.stated: true")
        fleet, shape = self.fleet, self.shape()
        limits = WorkerLimits(
            total_blocks=max(1, fleet.kv_tokens // fleet.block_size),
            max_num_seqs=fleet.max_num_seqs,
            max_num_batched_tokens=fleet.max_num_batched_tokens,
            lookahead_tokens=fleet.lookahead_tokens,
            whole_prompts=fleet.whole_prompts,
        )
        layout = KVLayout(fleet.block_size, shape.layers, 1, shape.kv_width, _DTYPES[shape.bytes], bytes(16))
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
            fetch=self._fetch(),
            targets=self.targets() if self.slo.stated else None,
            reject=_REJECT[self.admission],
        )

    def arrivals(self) -> list[Arrival]:
        """The requests, in order of arrival. Raises ConfigError."""
        loads = enumerate([self.workload, *self.also])
        return merge([load.arrivals(self.fleet.block_size, self.seed + number) for number, load in loads])

    def routing(self) -> Policy:
        match self.policy:
            case "default":
                return choose_pair
            case "kv-aware-global":
                rate = parse_bandwidth(self.fleet.link)
                return baselines.policy(baselines.kv_aware(self.cost_model(), rate))
            case "kv-aware":
                return baselines.policy(baselines.kv_aware(self.cost_model()))
            case "load-balance":
                return baselines.policy(baselines.load_balance)
            case _:
                return baselines.policy(baselines.random_choice(random.Random(self.seed)))

    def _fetch(self) -> Fetch:
        """Baselines take KV from elsewhere only where that is what they are about."""
        natural = {"default": Fetch.PAIR, "kv-aware-global": Fetch.FLEET}.get(self.policy, Fetch.NONE)
        fetch = Fetch(self.fleet.fetch) if self.fleet.fetch else natural
        if natural is Fetch.FLEET is not fetch:
            raise ConfigError("fleet.fetch: kv-aware-global takes KV from anybody; leave it out, or say fleet")
        return fetch

    def targets(self) -> SloTargets:
        return SloTargets(self.slo.ttft_ms / 1e3, self.slo.itl_ms / 1e3, self.slo.itl_percentile)

    def title(self) -> str:
        """What is simulated, in a line."""
        fleet, load = self.fleet, self.workload
        split = f"{fleet.prefill} prefill + {fleet.decode} decode"
        pools = f"{fleet.colocated} co-located" if fleet.colocated else split
        model = self.model if isinstance(self.model, str) else "a model of its own"
        source = load.trace.name if load.trace else "synthetic requests"
        speed = f" {load.rate:g} times as fast" if load.rate != 1 else ""
        return f"{pools} workers, {model}, {source}{speed}, {self.policy} policy"


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold keys such as fleet and workload")
    return content
