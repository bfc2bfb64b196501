"""What a router tells of its models and workers."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.policy.estimate import UNKNOWN, Speed


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class FleetLink:
    """A worker's end of a KV link, as in worker.proto: bytes, bytes a second (sending), seconds; 0 is not measured.

    `degraded` says why a slower path than expected was taken; empty where none was.
    """

    peer: str
    transport: str
    path: str
    degraded: str
    bytes_sent: int
    bytes_received: int
    bytes_per_second: float
    bytes_in_flight: int
    frames_in_flight: int
    credit_bytes: int
    round_trip_seconds: float


@dataclass(frozen=True, slots=True)
class FleetWorker:
    """One worker as the router sees it. What it has not said yet is empty; blocks add up to `total_blocks`.

    `endpoint` is where the router reaches it, `own_endpoint` what it tells other workers. `kv_token_bytes` is what one
    token weighs on its links, `speed` what its latest steps took.
    """

    endpoint: str
    connected: bool
    worker_id: str
    incarnation: str
    role: str
    model: str
    draining: bool
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    owned_blocks: int
    reserved_blocks: int
    running: int
    waiting: int
    preemptions: int
    kv_bytes_sent: int
    kv_bytes_received: int
    outstanding_tokens: int
    own_endpoint: str = ""
    max_model_len: int = 0
    vocab_size: int = 0
    kv_token_bytes: float = 0.0
    prefill_tokens_per_second: float = 0.0
    pending_prefill_tokens: int = 0
    busy_seconds: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    speed: Speed = UNKNOWN
    max_num_seqs: int = 0
    node: str = ""
    device: str = ""
    links: tuple[FleetLink, ...] = ()
