"""What a router measured in the last minute."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatencyStats:
    """Percentiles in milliseconds; all 0 where `count` is."""

    count: int = 0
    mean_ms: float = 0.0
    p50_ms: float = 0.0
    p90_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelStats:
    """One model's requests, as in stats.proto: `running` and `waiting` are now, all else is within the window."""

    model: str
    running: int
    waiting: int
    completed: int
    good: int
    failed: int
    cancelled: int
    ttft: LatencyStats
    itl: LatencyStats
    queue: LatencyStats
    requests_per_second: float
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    goodput: float
    cache_hit_rate: float
    replays: int


@dataclass(frozen=True, slots=True)
class Stats:
    """Of all models that one router serves, over the last `window_seconds`.

    The targets are those of requests that name none; `itl_target_ms` bounds `itl_target_percentile` (0 to 100) of an
    answer's own gaps.
    """

    router_id: str
    window_seconds: float
    models: tuple[ModelStats, ...]
    ttft_target_ms: float
    itl_target_ms: float
    itl_target_percentile: float
