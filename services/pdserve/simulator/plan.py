"""What is simulated: which workers, what each has, what carries KV between them, what befalls them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from pdserve.core.errors import ConfigError
from pdserve.core.layout import KVLayout
from pdserve.core.slo import SloTargets
from pdserve.policy.fleet import FleetView, PlacementRequest
from pdserve.policy.routing import Decision
from pdserve.simulator.costs import CostModel

Policy = Callable[[FleetView, PlacementRequest], Decision]


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """As an engine's configuration. `whole_prompts`: prompts are not chunked and stop decoding meanwhile, as engines
    did before chunked prefill."""

    total_blocks: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    lookahead_tokens: int = 128
    watermark_blocks: int = 0
    whole_prompts: bool = False


AMPLE = WorkerLimits(1 << 20)  # blocks enough for everything


@dataclass(frozen=True, slots=True)
class Outage:
    """`worker_id` dies at `at` and is back, empty, `seconds` later."""

    at: float
    worker_id: str
    seconds: float


class Fetch(StrEnum):
    """Where a prefill worker takes KV of a prompt's beginning from, where that is found faster than computing it."""

    NONE = "none"
    PAIR = "pair"  # the decode worker that the prompt goes to (`policy.pull`)
    FLEET = "fleet"  # also any other, as from a cache that all share (`policy.prefix_fetch`)


class Reject(StrEnum):
    """When a request is turned away at once, because the fleet's `targets` could not be kept for it."""

    NEVER = "never"
    CURRENT = "current"  # by the load at its arrival, and of decode workers once more when its prompt is through
    PREDICTED = "predicted"  # by the load that `policy.admission` predicts for when its prompt will be through


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A fleet. Workers are "prefill-0", "decode-0"...; `colocated` ones are decode workers without prefill ones.

    `link_bytes_per_second` is what one worker's network carries in each direction, `link_latency` in seconds what a
    hand-off takes at least. `speeds` slow single workers down or up (1: as the cost model says). `targets` are what
    requests ask for; without, they are measured against the policy's own, which hold nobody up.
    """

    layout: KVLayout
    cost: CostModel
    prefill: int = 0
    decode: int = 0
    colocated: int = 0
    prefill_limits: WorkerLimits = AMPLE
    decode_limits: WorkerLimits = AMPLE
    decode_cost: CostModel | None = None
    link_bytes_per_second: float = 25e9
    link_latency: float = 1e-3
    speeds: dict[str, float] = field(default_factory=dict)
    outages: tuple[Outage, ...] = ()
    fetch: Fetch = Fetch.PAIR
    targets: SloTargets | None = None
    reject: Reject = Reject.NEVER

    def check(self) -> None:
        """Raise ConfigError for counts and names that contradict each other."""
        if self.colocated and (self.prefill or self.decode):
            raise ConfigError("co-located workers prefill for themselves: leave prefill and decode out")
        if not self.colocated and not (self.prefill and self.decode):
            raise ConfigError("a fleet has prefill and decode workers, or co-located ones")
        names = set(self.names())
        if unknown := sorted({*self.speeds, *(outage.worker_id for outage in self.outages)} - names):
            raise ConfigError(f"no such workers: {unknown}; there are {sorted(names)}")
        if self.reject is not Reject.NEVER and self.targets is None:
            raise ConfigError("requests are rejected for targets that could not be kept: state them")

    def names(self) -> list[str]:
        return [
            *(f"prefill-{index}" for index in range(self.prefill)),
            *(f"decode-{index}" for index in range(self.decode + self.colocated)),
        ]
