"""A Sequence is a request inside an engine: its tokens, where their KV is, and how far computing has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pdserve.core.sampling import SamplingParams


class EndReason(StrEnum):
    """Why a worker is done with a sequence. STOP and LENGTH end the answer; HANDED_OFF goes on with it elsewhere; the
    others end only this try of it."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    TRANSFER_FAILED = "transfer_failed"
    DEADLINE = "deadline"
    NO_CAPACITY = "no_capacity"
    DRAINING = "draining"
    INVALID = "invalid"
    INTERNAL = "internal"
    HANDED_OFF = "handed_off"

    @property
    def answer_complete(self) -> bool:
        return self in (EndReason.STOP, EndReason.LENGTH)


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What a worker is given: everything that decides the tokens, resolved.

    `token_ids` is the prompt (its first `prompt_len` tokens) and then tokens that the client was shown already. Those
    are input like the prompt, but count as answer for penalties, min_tokens and max_tokens. `time_remaining` is in
    seconds, None: unbounded. `itl_target` are the seconds that the answer's gaps should not exceed, None: nobody asked.
    """

    request_id: str
    token_ids: tuple[int, ...]
    prompt_len: int
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    time_remaining: float | None = None
    traceparent: str = ""
    itl_target: float | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence in one engine. Its block table belongs to the engine's loop; nobody else changes it.

    Invariant: KV of tokens[:num_computed] is in the pages of `block_table`, and num_computed < len(tokens) while the
    sequence waits or runs.
    """

    id: str
    spec: SequenceSpec
    order: int
    tokens: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    num_pulled: int = 0  # of num_cached, what came from another worker
    num_published: int = 0
    deadline: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.spec.token_ids)

    @property
    def num_given(self) -> int:
        """Tokens that came as input: what prefill has to compute."""
        return len(self.spec.token_ids)

    @property
    def num_answer(self) -> int:
        return len(self.tokens) - self.spec.prompt_len

    @property
    def pending(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.tokens) - self.num_computed

    @property
    def in_prefill(self) -> bool:
        return self.num_computed < self.num_given

    def end_after(self, token: int, max_model_len: int) -> EndReason | None:
        """Whether the answer ends with `token`, the newest of `tokens`, and why."""
        params = self.spec.params
        if self.num_answer >= params.min_tokens:
            if token in params.stop_token_ids:
                return EndReason.STOP
            if not params.ignore_eos and token in self.spec.eos_token_ids:
                return EndReason.STOP
        if self.num_answer >= params.max_tokens or len(self.tokens) >= max_model_len:
            return EndReason.LENGTH
        return None
