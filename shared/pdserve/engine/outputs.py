"""What an engine tells of its steps: small records that a worker's front gets as they are. No torch in here."""

from __future__ import annotations

import msgspec

from pdserve.core.sequence import EndReason
from pdserve.policy.estimate import UNKNOWN, Speed


class TokenLogprobs(msgspec.Struct, frozen=True):
    logprob: float
    top: list[tuple[int, float]]


class TokenOut(msgspec.Struct, frozen=True, array_like=True):
    """One sampled token. `position` counts from the prompt's first token."""

    ticket: str
    position: int
    token: int
    logprobs: TokenLogprobs | None = None


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """Nothing of a ticket is here any more: it has no pages, and its id is free."""

    ticket: str
    reason: EndReason
    detail: str = ""


class ChunkDone(msgspec.Struct, frozen=True, array_like=True):
    """One prefill chunk of one sequence, for traces. Times are wall-clock nanoseconds."""

    ticket: str
    start: int
    end: int
    tokens: int


class PromptDone(msgspec.Struct, frozen=True, array_like=True):
    """A prompt is computed; its first token is in the same step. Times are in seconds.

    `end`: why the answer ends with that token, if it does. Ended follows: at once, or when no link reads the pages.
    """

    ticket: str
    cached_tokens: int
    blocks_reused: int
    queued: float
    compute: float
    pulled_tokens: int = 0
    end: EndReason | None = None


class Load(msgspec.Struct, frozen=True):
    """The engine's state; fields as in worker.proto's WorkerLoad. `busy_seconds` to `prefix_hits` count since it
    started; the last two are prompt tokens looked up in its own cache, and those found there."""

    free_blocks: int
    cached_blocks: int
    owned_blocks: int
    reserved_blocks: int
    running: int
    waiting: int
    pending_prefill_tokens: int
    steps: int
    preemptions: int
    kv_bytes_sent: int
    kv_bytes_received: int
    prefill_rate: float = 0.0
    busy_seconds: float = 0.0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    pending_prefill_squares: int = 0
    bounded: int = 0
    speed: Speed = UNKNOWN
