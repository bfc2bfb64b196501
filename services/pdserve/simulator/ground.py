"""What every question about a fleet needs: its workers, a model, what steps cost, what is promised."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, ValidationError

from pdserve.core.errors import ConfigError
from pdserve.core.fabric import parse_bandwidth
from pdserve.core.layout import KVLayout
from pdserve.core.slo import SloTargets
from pdserve.simulator.cost_parts import KINDS, CostKey, ModelKey, RooflinePart, cost_model, model_shape
from pdserve.simulator.costs import CostModel, ModelShape
from pdserve.simulator.parts import FleetPart, Part, SloPart
from pdserve.simulator.plan import FleetPlan, Outage, WorkerLimits
from pdserve.simulator.problems import sentences

_DTYPES = {2: "bfloat16", 4: "float32"}


class Ground(Part):
    """A fleet and what it runs, without what arrives."""

    fleet: FleetPart
    model: ModelKey = Field(default="llama3-8b", description="a name, or its figures")
    cost: CostKey = Field(default=RooflinePart(hardware="h100"), description="how long a step takes")
    slo: SloPart = SloPart()

    @classmethod
    def checked(cls, content: Mapping[str, Any], problem: str) -> Self:
        """Of keys and values. Raises ConfigError, which begins with `problem`, a line a mistake."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise ConfigError("\n  ".join([f"{problem}:", *sentences(error, cls, KINDS)])) from error

    def shape(self) -> ModelShape:
        return model_shape(self.model)

    def cost_model(self) -> CostModel:
        """Raises ConfigError for a file that does not hold it."""
        return cost_model(self.cost, self.shape())

    def targets(self) -> SloTargets:
        return SloTargets(self.slo.ttft_ms / 1e3, self.slo.itl_ms / 1e3, self.slo.itl_percentile)

    def workers(self) -> FleetPlan:
        """The workers, and what befalls them. Raises ConfigError."""
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
            targets=self.targets() if self.slo.stated else None,
        )


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys of a plan. Raises ConfigError."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold keys such as fleet and workload")
    return content
