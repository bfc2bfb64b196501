"""What a request answers with: PromptInfo first, then Outputs, then Finish; and Completion, all of it as one value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pdserve.core.sampling import SamplingParams


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """First event: what the router made of the request. `params` and `stop` are the values in force."""

    request_id: str
    model: str
    prompt_tokens: int
    params: SamplingParams
    stop: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Token:
    """One token; `logprob` is None, and `top` empty, unless log-probabilities were asked for.

    `token_bytes`, and `top_bytes` for the tokens of `top`, are empty unless bytes were asked for.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    token_bytes: bytes = b""
    top_bytes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens from answer index `index` on, and text that may lag behind them."""

    index: int
    tokens: tuple[Token, ...]
    text: str

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]


@dataclass(frozen=True, slots=True)
class Stages:
    """Milliseconds, as in inference.proto."""

    queue_ms: float
    reserve_ms: float
    prefill_ms: float
    transfer_exposed_ms: float
    decode_wait_ms: float
    first_step_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request took, as in inference.proto."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    kv_transfer_bytes: int
    blocks_reused: int
    stages: Stages
    replays: int
    prefill_worker: str
    decode_worker: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Last event. At most one of `stop_string` and `stop_token_id` is set."""

    reason: FinishReason
    usage: Usage
    stop_string: str | None = None
    stop_token_id: int | None = None


Event = PromptInfo | Output | Finish


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer, as `Client.complete` returns it."""

    prompt: PromptInfo
    tokens: tuple[Token, ...]
    text: str
    finish: Finish

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]
