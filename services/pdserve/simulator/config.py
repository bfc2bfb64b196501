"""What to simulate, as a YAML file says it. An unknown or contradictory key is an error that names it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pdserve.core.errors import ConfigError
from pdserve.core.fabric import parse_bandwidth
from pdserve.policy.routing import choose_pair
from pdserve.simulator import baselines, flags
from pdserve.simulator.flags import Flags
from pdserve.simulator.ground import Ground, read_yaml
from pdserve.simulator.parts import WorkloadPart
from pdserve.simulator.plan import Fetch, FleetPlan, Policy, Reject
from pdserve.simulator.workload import Arrival, merge

NO_PLAN = (
    "give a file, or flags for workers (--prefill and --decode, or --colocated) and for what arrives (--trace, or "
    "--prompt-tokens, --output-tokens and --rate)"
)
_REJECT = {"none": Reject.NEVER, "current": Reject.CURRENT, "predicted": Reject.PREDICTED}


class SimulationSettings(Ground):
    """One simulation."""

    workload: WorkloadPart
    also: list[WorkloadPart] = Field(default_factory=list, description="more of what arrives, beside it")
    policy: Literal["default", "kv-aware-global", "kv-aware", "load-balance", "random"] = Field(
        default="default", description="what the router runs, or one to compare it with"
    )
    admission: Literal["none", "current", "predicted"] = Field(
        default="none",
        description="turn away what cannot be served within the targets, by the load now or when its prompt is through",
    )
    seed: int = Field(default=0, description="of synthetic streams and random policies")

    @classmethod
    def load(
        cls, path: Path | None, changes: Mapping[str, Any] | None = None, said: Flags | None = None
    ) -> SimulationSettings:
        """From a YAML file if any, with flags over it, and single values over both: {"fleet.prefill": 4}.

        Raises ConfigError, a line a problem.
        """
        content = read_yaml(path) if path else {}
        if said is not None:
            flags.apply(said, content)
        flags.put(content, changes or {})
        if path is None and not {"fleet", "workload"} <= content.keys():
            raise ConfigError(NO_PLAN)
        settings = cls.checked(content, f"{path} cannot be simulated" if path else "this cannot be simulated")
        settings.plan().check()
        return settings

    def plan(self) -> FleetPlan:
        """Raises ConfigError."""
        if self.admission != "none" and not self.slo.stated:
            raise ConfigError("admission: goes by what requests ask for; say slo.stated: true")
        return replace(self.workers(), fetch=self._fetch(), reject=_REJECT[self.admission])

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

    def title(self) -> str:
        """What is simulated, in a line."""
        fleet, load = self.fleet, self.workload
        split = f"{fleet.prefill} prefill + {fleet.decode} decode"
        pools = f"{fleet.colocated} co-located" if fleet.colocated else split
        model = self.model if isinstance(self.model, str) else "a model of its own"
        source = load.trace.name if load.trace else "synthetic requests"
        speed = f" {load.rate:g} times as fast" if load.rate != 1 else ""
        return f"{pools} workers, {model}, {source}{speed}, {self.policy} policy"
