"""How the next token is chosen and when an answer ends: resolved values, checked once at the door."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.core.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Every value that sampling and stopping depend on, none unset.

    Temperature 0 is greedy. `seed` is below 2**64. `logprobs` is None (none wanted) or how many of the most likely
    tokens come beside each chosen one. `min_tokens` holds back `eos_token_ids` and `stop_token_ids` alike.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    def check(self, vocab_size: int) -> None:
        """Raise InvalidRequest, with the API's field path, for the first value that is out of range."""
        for path, value, low, high, bounds in (
            ("sampling.temperature", self.temperature, 0.0, math.inf, "0 or more"),
            ("sampling.min_p", self.min_p, 0.0, 1.0, "in [0, 1]"),
            ("sampling.presence_penalty", self.presence_penalty, -2.0, 2.0, "in [-2, 2]"),
            ("sampling.frequency_penalty", self.frequency_penalty, -2.0, 2.0, "in [-2, 2]"),
        ):
            if not (math.isfinite(value) and low <= value <= high):
                raise InvalidRequest(path, f"must be {bounds} and finite, got {value}")
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise InvalidRequest("sampling.top_p", f"must be in (0, 1], got {self.top_p}")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0):
            raise InvalidRequest("sampling.repetition_penalty", f"must be above 0, got {self.repetition_penalty}")
        if self.top_k < 0:
            raise InvalidRequest("sampling.top_k", f"must be 0 (all) or more, got {self.top_k}")
        if not 0 <= self.seed < 2**64:
            raise InvalidRequest("sampling.seed", f"must be in [0, 2**64), got {self.seed}")
        self._check_bias(vocab_size)
        self._check_stopping(vocab_size)
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidRequest("response.logprobs", f"must be in [0, {MAX_LOGPROBS}], got {self.logprobs}")

    def _check_bias(self, vocab_size: int) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest("sampling.logit_bias", f"at most {MAX_LOGIT_BIAS} entries, got {len(self.logit_bias)}")
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    "sampling.logit_bias", f"token id {token} is outside the vocabulary of {vocab_size}"
                )
            if not (math.isfinite(bias) and -100.0 <= bias <= 100.0):
                raise InvalidRequest("sampling.logit_bias", f"must be in [-100, 100], got {bias} for token {token}")

    def _check_stopping(self, vocab_size: int) -> None:
        if self.max_tokens < 1:
            raise InvalidRequest("stopping.max_tokens", f"must be 1 or more, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidRequest(
                "stopping.min_tokens", f"must be in [0, max_tokens={self.max_tokens}], got {self.min_tokens}"
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                "stopping.stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS}, got {len(self.stop_token_ids)}"
            )
        for token in self.stop_token_ids:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    "stopping.stop_token_ids", f"token id {token} is outside the vocabulary of {vocab_size}"
                )
