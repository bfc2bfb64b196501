"""What a policy may know about the workers: immutable values, built by the router from what workers report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self

from pdserve.core.layout import KVLayout
from pdserve.core.slo import SloTargets
from pdserve.policy.estimate import NOMINAL, UNKNOWN, Speed
from pdserve.policy.reservation import reserved_tokens

# What nobody named is measured against these, and holds nobody up (see PlacementRequest.stated).
DEFAULT_TARGETS = SloTargets(0.5, 0.05, 99.0)
AIM = 0.95


def aim(targets: SloTargets) -> SloTargets:
    """What to plan for where `targets` were promised: a little less. Under load a fleet is filled up to whatever is
    allowed, and of what is predicted to be just in time every second one is late."""
    return SloTargets(AIM * targets.ttft, AIM * targets.itl, targets.itl_percentile)


class Target(StrEnum):
    """What would not be kept."""

    TTFT = "ttft"
    ITL = "itl"
    DEADLINE = "deadline"


BOTH = frozenset((Target.TTFT, Target.ITL))


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

    `available_blocks` is free plus evictable blocks as last reported. What this router sent since, and the report
    cannot know of yet, is counted beside it: `in_flight_blocks`, and of prompts that have to be computed
    `prefill_tokens` and `prefill_squares`. `outstanding_tokens` are those of sequences that this router sent and has
    not seen the end of. The `reported_` figures count every router's work. `claimed` ones wait in this router until
    the worker takes more. `bounded` sequences are those whose gaps somebody asked to be bounded. `squares` are of
    tokens that wait to be computed, as in `policy.estimate`. `step_since` is when the step under way began, by the
    clock of `PlacementRequest.now`. `links` are the worker's KV links that are up, by the peer's worker id. `node` is
    the machine's name.
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
    prefill_squares: int = 0
    sequences: int = 0
    bounded: int = 0
    # How many sequences this router has sent here so far: the last tie-break, so that equals take turns.
    placed: int = 0
    reported_sequences: int = 0
    reported_bounded: int = 0
    reported_prefill_tokens: int = 0
    reported_prefill_squares: int = 0
    reported_owned_blocks: int = 0
    claimed_tokens: int = 0
    claimed_squares: int = 0
    step_since: float = 0.0
    speed: Speed = UNKNOWN
    node: str = ""
    links: Mapping[str, LinkFacts] = field(default_factory=dict, hash=False)

    # What follows from the above, computed once: a decision reads it of many workers.
    usable: bool = field(init=False, compare=False)
    room: int = field(init=False, compare=False)
    answers: int = field(init=False, compare=False)
    unbounded: int = field(init=False, compare=False)
    prefill_backlog: int = field(init=False, compare=False)
    accepts_prompt: bool = field(init=False, compare=False)
    load: int = field(init=False, compare=False)
    queued_tokens: int = field(init=False, compare=False)
    queued_squares: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """`room` are the blocks that a new sequence may count on; `answers` the sequences that are here, or will be
        soon, and `unbounded` those of them that nobody asked gaps for; `prefill_backlog` the prompt tokens that wait to
        be computed, whoever sent them. A worker with a step's worth of prompts `accepts_prompt` no more: later ones are
        decided later, with newer views. `load` are the tokens that it has to do with: its backlog, or for a decode
        worker all that its sequences hold. What is `queued` waits to be computed here, or in the router for it."""
        backlog = self.prefill_tokens + self.reported_prefill_tokens
        held = max(self.outstanding_tokens, self.reported_owned_blocks * self.layout.block_size)
        derive = object.__setattr__  # it is frozen for everybody else
        derive(self, "usable", self.connected and not self.draining)
        derive(self, "room", self.available_blocks - self.in_flight_blocks)
        derive(self, "answers", max(self.sequences, self.reported_sequences))
        unbounded = max(self.sequences - self.bounded, self.reported_sequences - self.reported_bounded)
        derive(self, "unbounded", unbounded)
        derive(self, "prefill_backlog", backlog)
        derive(self, "accepts_prompt", backlog < max(1, self.max_num_batched_tokens))
        derive(self, "load", backlog if self.role is Role.PREFILL else held)
        derive(self, "queued_tokens", backlog + self.claimed_tokens)
        derive(self, "queued_squares", self.prefill_squares + self.reported_prefill_squares + self.claimed_squares)


@dataclass(frozen=True, slots=True)
class Assumed:
    """How fast the fastest are of those that are up and have computed enough to say; NOMINAL where none has, so that
    tokens are all that is compared. A newcomer is taken for as fast.

    Not for as slow as the slowest, however careful that sounds: it would get nothing as long as somebody else is idle,
    and who does nothing never says how fast it is. What is wrong about this guess is known a few steps later."""

    prompts: Speed = NOMINAL
    answers: Speed = NOMINAL

    @classmethod
    def of(cls, workers: Iterable[WorkerView]) -> Self:
        speeds = [worker.speed for worker in workers if worker.usable]
        prompts = (speed for speed in speeds if speed.knows_prompts)
        answers = (speed for speed in speeds if speed.knows_answers)
        return cls(
            min(prompts, key=lambda speed: speed.prompt_seconds(512, 512**2, 512), default=NOMINAL),
            min(answers, key=lambda speed: speed.decode_seconds(16, 16 * 512), default=NOMINAL),
        )


@dataclass(frozen=True, slots=True)
class FleetView:
    """All workers of one model that the router knows, also those that are down; `index` finds them by id.

    `unanswered` are configured endpoints that have not answered yet, so that their role is unknown; the router leaves
    an endpoint out once it was silent for longer than starting takes. `assumed` are its fastest workers' speeds.
    """

    prefill: tuple[WorkerView, ...] = ()
    decode: tuple[WorkerView, ...] = ()
    index: Mapping[str, WorkerView] = field(default_factory=dict, hash=False)
    unanswered: tuple[str, ...] = ()
    assumed: Assumed = Assumed()

    @classmethod
    def of_workers(cls, workers: Iterable[WorkerView], unanswered: tuple[str, ...] = ()) -> Self:
        """A view of `workers`, whose ids differ."""
        pools: dict[Role, list[WorkerView]] = {Role.PREFILL: [], Role.DECODE: []}
        for worker in workers:
            pools[worker.role].append(worker)
        everyone = {worker.worker_id: worker for pool in pools.values() for worker in pool}
        assumed = Assumed.of(everyone.values())
        return cls(tuple(pools[Role.PREFILL]), tuple(pools[Role.DECODE]), everyone, unanswered, assumed)

    def of(self, role: Role) -> tuple[WorkerView, ...]:
        return self.prefill if role is Role.PREFILL else self.decode

    def prompt_speed(self, worker: WorkerView) -> Speed:
        """How fast `worker` computes prompts, or probably does."""
        return worker.speed if worker.speed.knows_prompts else self.assumed.prompts

    def answer_speed(self, worker: WorkerView) -> Speed:
        """As `prompt_speed`, of answers."""
        return worker.speed if worker.speed.knows_answers else self.assumed.answers

    def claimed(self, worker_id: str, tokens: int, squares: int) -> FleetView:
        """This view, but for a prompt that waits in the router until the prefill worker `worker_id` takes more."""
        worker = self.index[worker_id]
        more = replace(
            worker,
            claimed_tokens=worker.claimed_tokens + tokens,
            claimed_squares=worker.claimed_squares + squares,
        )
        prefill = tuple(more if other is worker else other for other in self.prefill)
        return replace(self, prefill=prefill, index={**self.index, worker_id: more})


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What placing a sequence depends on.

    `tokens` are its given tokens (prompt and shown answer), `remaining` is how many more it may produce and `expected`
    how many it probably will (0: nothing is known). `held` is worker id -> leading full blocks in that worker's cache,
    `excluded` are workers that refused it a moment ago, and `was_refused` says that one did at any time: from then on
    its cached blocks are not counted as room. `near` are workers that had its conversation last.

    `waited` are the seconds since it arrived, `down_for` those since which no worker was up for it. `stated` are those
    of its `targets` that somebody asked for: it waits for a place that keeps them, until `overtaken`, the number of
    those that were placed past it, says that waiting does not help. `draw` is its random number, for fleets of which
    only a sample is looked at. `now` is when this is asked, in seconds of the caller's clock.
    """

    tokens: int
    remaining: int
    held: Mapping[str, int] = field(default_factory=dict)
    excluded: frozenset[str] = frozenset()
    was_refused: bool = False
    expected: int = 0
    near: frozenset[str] = frozenset()
    targets: SloTargets = DEFAULT_TARGETS
    stated: frozenset[Target] = frozenset()
    waited: float = 0.0
    down_for: float = 0.0
    overtaken: int = 0
    draw: int = 0
    now: float = 0.0

    @property
    def planned(self) -> SloTargets:
        """What to plan for."""
        return aim(self.targets) if self.stated else self.targets

    def blocks(self, worker: WorkerView, *, decoding: bool) -> int:
        """KV blocks that the sequence takes on `worker`: its given tokens, and, where it decodes, a look-ahead."""
        remaining = self.remaining if decoding else 0
        return worker.layout.blocks_for(reserved_tokens(self.tokens, remaining, worker.lookahead_tokens))

    @property
    def tokens_to_end(self) -> int:
        """What the sequence probably has in its end."""
        return self.tokens + (min(self.expected, self.remaining) if self.expected else 0)

    def held_tokens(self, worker: WorkerView) -> int:
        """Leading tokens that `worker` need not compute. The last one is always computed, for its logits."""
        if not (blocks := self.held.get(worker.worker_id, 0)):
            return 0
        size = worker.layout.block_size
        return min(blocks, (self.tokens - 1) // size) * size
