"""Which sequences hold which pages and compute what next. One engine loop owns it.

Admission is all or nothing and at once: a sequence gets pages for its whole input (and look-ahead) or is refused, so
nothing in here ever waits for pages while holding some. Only answers grow, block by block; when no block is left for
one, the lowest in priority, then the youngest, is preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from pdserve.core.blocks import BlockPool
from pdserve.core.errors import NoCapacity
from pdserve.core.hashing import extend_hashes, root_hash
from pdserve.core.layout import KVLayout
from pdserve.core.sequence import Sequence, SequenceSpec
from pdserve.policy.batching import Claim, Joining, Work, choose_victim, plan_step
from pdserve.policy.estimate import Speed
from pdserve.policy.reservation import fits, reserved_tokens


class Phase(StrEnum):
    """Where a sequence is in its life here."""

    RUNNING = "running"  # computes in steps
    AWAITING_KV = "awaiting_kv"  # its pages are being filled by a prefill worker
    SENDING_KV = "sending_kv"  # computed; its pages are read by a link until a decode worker took over
    CLOSING = "closing"  # over; a link still has to let go of its pages


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`watermark_blocks` stay free when a sequence is admitted beside others, so that running answers can grow."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    lookahead_tokens: int
    watermark_blocks: int
    prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class Scheduled:
    """`count` tokens of one sequence that this step computes."""

    sequence: Sequence
    count: int

    @property
    def samples(self) -> bool:
        """Whether this reaches the sequence's last token, so that the next one is sampled."""
        return self.sequence.num_computed + self.count == len(self.sequence.tokens)


class Scheduler:
    """The block pool and every admitted sequence.

    `copy_block(source, target)` copies one page in all layers; it is used where a whole input is cached and only its
    last token has to be computed again, for its logits, without writing into a page that others read.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, config: SchedulerConfig, copy_block: Callable[[int, int], None]
    ) -> None:
        self.layout, self.config = layout, config
        self.pool = BlockPool(num_blocks)
        self.preemptions = 0
        self.prefix_queries = self.prefix_hits = 0  # input tokens of admitted sequences, and those found in the cache
        self._copy_block = copy_block
        self._sequences: dict[str, Sequence] = {}
        self._phase: dict[str, Phase] = {}
        self._running: list[Sequence] = []
        self._lent: dict[str, list[int]] = {}
        self._joining = Joining()
        self._root = lru_cache(maxsize=1024)(lambda salt: root_hash(layout, salt))

    def __contains__(self, ticket: str) -> bool:
        return ticket in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def get(self, ticket: str) -> tuple[Sequence, Phase] | None:
        sequence = self._sequences.get(ticket)
        return None if sequence is None else (sequence, self._phase[ticket])

    @property
    def running(self) -> list[Sequence]:
        return self._running

    def admit(self, sequence: Sequence, *, awaits_kv: bool, grows: bool) -> None:
        """Give a sequence its pages and take it in. Raises NoCapacity, and changes nothing, where it does not fit.

        Leading blocks that are cached are shared; `sequence.num_cached` says how many tokens they hold. `awaits_kv`:
        its KV comes over a link, so a hit may cover all of the input. `grows`: an answer will be computed here, so
        pages for the look-ahead are taken too.
        """
        if len(self) >= self.config.max_num_seqs:
            raise NoCapacity(f"{len(self)} sequences are here already, max_num_seqs is {self.config.max_num_seqs}")
        given, size = sequence.num_given, self.layout.block_size
        last = min(sequence.spec.prompt_len + sequence.spec.params.max_tokens, self.config.max_model_len)
        wanted = reserved_tokens(given, last - given if grows else 0, self.config.lookahead_tokens)
        hits: list[int] = []
        if self.config.prefix_caching:
            extend_hashes(sequence.hashes, self._root(sequence.spec.cache_salt), sequence.tokens, size)
            hits = self.pool.match(sequence.hashes)
        # All of the input is cached, but its last token's logits are needed: that one page becomes a copy.
        copied = hits.pop() if hits and not awaits_kv and len(hits) * size == given else None
        fresh = self.layout.blocks_for(wanted) - len(hits)
        watermark, others = self.config.watermark_blocks, len(self) > 0
        pinned = hits if copied is None else [*hits, copied]
        if copied is not None and not fits(fresh, self.pool.available_after(pinned), watermark, others):
            copied, pinned = None, hits  # no room for the original beside its copy: compute that page instead
        available = self.pool.available_after(pinned)
        if not fits(fresh, available, watermark, others):
            raise NoCapacity(
                f"{fresh} KV blocks wanted beside {len(hits)} cached ones and {watermark if others else 0} kept free, "
                f"{available} of {self.pool.num_blocks} available"
            )
        self.pool.acquire(pinned)
        sequence.block_table = hits + self.pool.allocate(fresh)
        sequence.num_cached = sequence.num_computed = len(hits) * size
        sequence.num_published = len(hits)
        if copied is not None:
            self._copy_block(copied, sequence.block_table[len(hits)])
            self.pool.release([copied])
            sequence.num_cached = sequence.num_computed = given - 1
        if self.config.prefix_caching:
            self.prefix_queries += given
            self.prefix_hits += sequence.num_cached
        if awaits_kv:
            self._joining.announce(sequence.spec.itl_target)
        self._sequences[sequence.id] = sequence
        self.set_phase(sequence, Phase.AWAITING_KV if awaits_kv else Phase.RUNNING)

    def extend(self, sequence: Sequence, spec: SequenceSpec) -> None:
        """Give a sequence that awaits its KV the longer input of `spec`, which begins with its own, and the pages that
        this takes. Raises NoCapacity, and changes nothing, where there are too few."""
        missing = self.layout.blocks_for(len(spec.token_ids)) - len(sequence.block_table)
        if missing > 0:
            sequence.block_table += self.pool.allocate(missing)
        sequence.spec, sequence.tokens = spec, list(spec.token_ids)

    def set_phase(self, sequence: Sequence, phase: Phase) -> None:
        before = self._phase.get(sequence.id)
        self._phase[sequence.id] = phase
        if phase is Phase.RUNNING and before is not Phase.RUNNING:
            self._running.append(sequence)
        elif before is Phase.RUNNING and phase is not Phase.RUNNING:
            self._running.remove(sequence)

    def schedule(self, speed: Speed | None = None) -> tuple[list[Scheduled], list[Sequence]]:
        """The next step's batch, and the sequences that were preempted to make room for it (released already). By
        `speed` prompts leave answers the time between tokens that they asked for."""
        preempted: list[Sequence] = []
        for sequence in list(self._running):
            if sequence.id in self._sequences:
                preempted += self._grow(sequence)
        work = [Work(s.pending, s.in_prefill, s.num_computed, s.spec.itl_target) for s in self._running]
        joining = self._joining.next() if any(item.prefill for item in work) else None
        counts = plan_step(work, self.config.max_num_batched_tokens, speed, joining)
        batch = [Scheduled(sequence, count) for sequence, count in zip(self._running, counts, strict=True) if count]
        return batch, preempted

    def computed(self, sequence: Sequence, count: int) -> None:
        """Note that the KV of `count` more tokens is in its pages, and publish the blocks that became full."""
        sequence.num_computed += count
        full = sequence.num_computed // self.layout.block_size
        if not self.config.prefix_caching or full == sequence.num_published:
            return
        root = self._root(sequence.spec.cache_salt)
        extend_hashes(sequence.hashes, root, sequence.tokens, self.layout.block_size)
        for index in range(sequence.num_published, full):
            self.pool.publish(sequence.block_table[index], sequence.hashes[index])
        sequence.num_published = full

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence; its full blocks stay findable as cache. Nobody may read or write its pages any more."""
        self.set_phase(sequence, Phase.CLOSING)
        del self._sequences[sequence.id], self._phase[sequence.id]
        self.pool.release(sequence.block_table)
        sequence.block_table = []

    def lend(self, key: str, blocks: list[int]) -> None:
        """Keep owned blocks as they are until `take_back(key)`, whatever becomes of their sequence."""
        self.pool.acquire(blocks)
        self._lent[key] = blocks

    def lends(self, key: str) -> bool:
        return key in self._lent

    def take_back(self, key: str) -> None:
        """Nobody reads what was lent under `key` any more; an unknown key is nothing."""
        self.pool.release(self._lent.pop(key, []))

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every reference in the pool is accounted for by a sequence or a loan here."""
        self.pool.check_integrity([*(sequence.block_table for sequence in self), *self._lent.values()])

    def reserved_blocks(self) -> int:
        """Blocks that sequences without complete KV hold alone."""
        size = self.layout.block_size
        return sum(len(s.block_table) - s.num_cached // size for s in self if self._phase[s.id] is Phase.AWAITING_KV)

    def _grow(self, sequence: Sequence) -> list[Sequence]:
        """Make sure of a page for the last token, preempting others, or the sequence itself, where none is left."""
        preempted: list[Sequence] = []
        needed = self.layout.blocks_for(len(sequence.tokens)) - len(sequence.block_table)
        while needed > 0 and self.pool.num_available < needed:
            victim = self._running[choose_victim([Claim(s.spec.priority, s.order) for s in self._running])]
            self.release(victim)
            self.preemptions += 1
            preempted.append(victim)
            if victim is sequence:
                return preempted
        if needed > 0:
            sequence.block_table += self.pool.allocate(needed)
        return preempted
