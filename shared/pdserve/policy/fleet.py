"""What a policy may know about the workers: immutable values, built by the router from what workers report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pdserve.core.layout import KVLayout
from pdserve.policy.reservation import reserved_tokens


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """One end of a KV link: what it was measured to send, in bytes a second (0: not measured), and what carries it."""

    bytes_per_second: float
    path: str


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker of one model, at one moment.

    `available_blocks` is free plus evictable blocks as last reported. What the router sent since, and the report
    cannot know of yet, is counted beside it: `in_flight_blocks`. `outstanding_tokens` are those of sequences that this
    router sent and has not seen the end of, `prefill_tokens` those of them without a first token. The `reported_`
    figures count every router's work. `links` are the worker's KV links that are up, by the peer's worker id.
    """

    worker_id: str
    role: Role
    layout: KVLayout
    max_num_seqs: int
    max_num_batched_tokens: int
    total_blocks: int
    available_blocks: int
    lookahead_tokens: int = 0
    watermark_blocks: int = 0
    connected: bool = True
    draining: bool = False
    in_flight_blocks: int = 0
    outstanding_tokens: int = 0
    prefill_tokens: int = 0
    sequences: int = 0
    # How many sequences this router has sent here so far: the last tie-break, so that equals take turns.
    placed: int = 0
    reported_sequences: int = 0
    reported_prefill_tokens: int = 0
    reported_owned_blocks: int = 0
    links: Mapping[str, LinkFacts] = field(default_factory=dict, hash=False)

    @property
    def usable(self) -> bool:
        return self.connected and not self.draining

    @property
    def room(self) -> int:
        """Blocks that a new sequence may count on."""
        return self.available_blocks - self.in_flight_blocks

    @property
    def has_seat(self) -> bool:
        """Whether one more sequence is within the worker's limit on sequences."""
        return max(self.sequences, self.reported_sequences) < self.max_num_seqs

    @property
    def prefill_backlog(self) -> int:
        """Prompt tokens that wait to be computed here, whoever sent them."""
        return max(self.prefill_tokens, self.reported_prefill_tokens)

    @property
    def load(self) -> int:
        """Tokens that this worker has to do with: its backlog, or for a decode worker all that its sequences hold."""
        if self.role is Role.PREFILL:
            return self.prefill_backlog
        return max(self.outstanding_tokens, self.reported_owned_blocks * self.layout.block_size)


@dataclass(frozen=True, slots=True)
class FleetView:
    """All workers of one model that the router knows, also those that are down.

    `unanswered` are configured endpoints that have not answered yet, so that their role is unknown; the router leaves
    an endpoint out once it was silent for longer than starting takes.
    """

    workers: tuple[WorkerView, ...] = ()
    unanswered: tuple[str, ...] = ()

    def of(self, role: Role) -> tuple[WorkerView, ...]:
        return tuple(worker for worker in self.workers if worker.role is role)


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What placing a sequence depends on.

    `tokens` are its given tokens (prompt and shown answer), `remaining` is how many more it may produce, `held` is
    worker id -> leading full blocks in that worker's cache, `excluded` are workers that refused it a moment
    ago, and `was_refused` says that one did at any time: from then on its cached blocks are not counted as room.
    """

    tokens: int
    remaining: int
    held: dict[str, int] = field(default_factory=dict)
    excluded: frozenset[str] = frozenset()
    was_refused: bool = False

    def blocks(self, worker: WorkerView, *, decoding: bool) -> int:
        """KV blocks that the sequence takes on `worker`: its given tokens, and, where it decodes, a look-ahead."""
        remaining = self.remaining if decoding else 0
        return worker.layout.blocks_for(reserved_tokens(self.tokens, remaining, worker.lookahead_tokens))

    def held_tokens(self, worker: WorkerView) -> int:
        """Leading tokens that `worker` need not compute. The last one is always computed, for its logits."""
        blocks = min(self.held.get(worker.worker_id, 0), (self.tokens - 1) // worker.layout.block_size)
        return blocks * worker.layout.block_size
