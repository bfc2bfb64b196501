"""Pages go to sequences whole or not at all, grow by blocks, and come back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.core.errors import NoCapacity
from pdserve.core.layout import KVLayout
from pdserve.core.sampling import SamplingParams
from pdserve.core.sequence import Sequence, SequenceSpec
from pdserve.engine.scheduler import Phase, Scheduler, SchedulerConfig
from pdserve.policy.batching import JOINED, SHARE
from pdserve.policy.estimate import ENOUGH, Speed

LAYOUT = KVLayout(4, 2, 1, 8, "float32", b"f" * 16)


class Pages:
    """Records page copies."""

    def __init__(self) -> None:
        self.copies: list[tuple[int, int]] = []

    def copy(self, source: int, target: int) -> None:
        self.copies.append((source, target))


def make(num_blocks: int = 8, **changes: int | bool) -> tuple[Scheduler, Pages]:
    values: dict[str, int | bool] = {
        "max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16, "lookahead_tokens": 4,
        "watermark_blocks": 0, "prefix_caching": True,
    }  # fmt: skip
    pages = Pages()
    return Scheduler(LAYOUT, num_blocks, SchedulerConfig(**{**values, **changes}), pages.copy), pages  # type: ignore[arg-type]


def sequence(name: str, tokens: range, order: int = 0, max_tokens: int = 20, priority: int = 0) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(name, SequenceSpec(name, tuple(tokens), len(tokens), params, priority=priority), order)


def admit(scheduler: Scheduler, seq: Sequence, *, awaits_kv: bool = False, grows: bool = True) -> None:
    scheduler.admit(seq, awaits_kv=awaits_kv, grows=grows)
    scheduler.check_integrity()


def compute(scheduler: Scheduler, seq: Sequence, token: int = 1) -> None:
    """Stand in for steps: all pending KV computed, one token sampled."""
    scheduler.computed(seq, seq.pending)
    seq.tokens.append(token)


def test_look_ahead_is_reserved_but_not_beyond_what_the_answer_can_use() -> None:
    scheduler, _ = make()
    long, short, last = sequence("a", range(6)), sequence("b", range(6, 10), max_tokens=1), sequence("c", range(4))
    admit(scheduler, long)
    admit(scheduler, short)
    admit(scheduler, last, grows=False)
    assert [len(s.block_table) for s in (long, short, last)] == [3, 2, 1]


def test_refusal_changes_nothing() -> None:
    scheduler, _ = make(num_blocks=4, watermark_blocks=1)
    admit(scheduler, sequence("a", range(8), max_tokens=1))
    with pytest.raises(NoCapacity, match="1 KV blocks wanted beside 0 cached ones and 1 kept free, 1 of 4"):
        admit(scheduler, sequence("b", range(50, 53), max_tokens=1))
    assert len(scheduler) == 1
    scheduler.check_integrity()


def test_the_watermark_does_not_lock_out_a_lone_sequence() -> None:
    scheduler, _ = make(num_blocks=4, watermark_blocks=1)
    lone = sequence("a", range(16), max_tokens=1)
    admit(scheduler, lone, grows=False)
    assert len(lone.block_table) == 4 and scheduler.pool.num_available == 0


def test_max_num_seqs_counts_everybody() -> None:
    scheduler, _ = make(max_num_seqs=1)
    admit(scheduler, sequence("a", range(2)), awaits_kv=True)
    with pytest.raises(NoCapacity, match="max_num_seqs is 1"):
        admit(scheduler, sequence("b", range(2)))


def test_a_shared_prefix_shares_pages() -> None:
    scheduler, pages = make()
    first = sequence("a", range(10))
    admit(scheduler, first)
    compute(scheduler, first)
    second = sequence("b", range(9))
    admit(scheduler, second)
    assert second.block_table[:2] == first.block_table[:2]
    assert (second.num_cached, second.num_computed) == (8, 8)
    assert pages.copies == []


def test_a_full_hit_copies_the_last_page_and_computes_one_token() -> None:
    scheduler, pages = make()
    first, second = sequence("a", range(8)), sequence("b", range(8))
    admit(scheduler, first)
    compute(scheduler, first)
    admit(scheduler, second)
    assert (second.num_cached, second.pending) == (7, 1)
    assert second.block_table[0] == first.block_table[0]
    assert second.block_table[1] != first.block_table[1]
    assert pages.copies == [(first.block_table[1], second.block_table[1])]
    scheduler.check_integrity()


def test_a_full_hit_that_awaits_kv_needs_nothing_sent() -> None:
    scheduler, pages = make()
    first, second = sequence("a", range(8)), sequence("b", range(8))
    admit(scheduler, first)
    compute(scheduler, first)
    admit(scheduler, second, awaits_kv=True)
    assert second.num_cached == 8
    assert pages.copies == []


def test_salts_never_share() -> None:
    scheduler, _ = make()
    first = sequence("a", range(8))
    admit(scheduler, first)
    compute(scheduler, first)
    salted = SequenceSpec("b", tuple(range(8)), 8, SamplingParams(), cache_salt="other")
    second = Sequence("b", salted, 1)
    admit(scheduler, second)
    assert second.num_cached == 0


def test_blocks_of_a_ticket_without_kv_are_not_findable() -> None:
    scheduler, _ = make()
    admit(scheduler, sequence("a", range(8)), awaits_kv=True)
    assert scheduler.reserved_blocks() == 3
    other = sequence("b", range(8))
    admit(scheduler, other)
    assert other.num_cached == 0


def test_the_youngest_gives_way_and_its_blocks_become_cache() -> None:
    scheduler, _ = make(num_blocks=4, lookahead_tokens=0)
    old, young = sequence("a", range(8), order=0), sequence("b", range(50, 58), order=1)
    admit(scheduler, old)
    admit(scheduler, young)
    for seq in (old, young):
        compute(scheduler, seq)
    batch, preempted = scheduler.schedule()
    assert preempted == [young]
    assert [s.sequence for s in batch] == [old]
    assert scheduler.preemptions == 1
    scheduler.check_integrity()
    assert scheduler.pool.num_cached == 1  # one of its two full blocks went to the old one


def test_priority_beats_age() -> None:
    scheduler, _ = make(num_blocks=4, lookahead_tokens=0)
    old, young = sequence("a", range(8), order=0), sequence("b", range(50, 58), order=1, priority=1)
    admit(scheduler, old)
    admit(scheduler, young)
    for seq in (old, young):
        compute(scheduler, seq)
    _, preempted = scheduler.schedule()
    assert preempted == [old]


def test_who_cannot_grow_beside_reservations_gives_way_itself() -> None:
    scheduler, _ = make(num_blocks=3, lookahead_tokens=0)
    seq = sequence("a", range(8))
    admit(scheduler, seq)
    admit(scheduler, sequence("b", range(50, 54), max_tokens=1), awaits_kv=True, grows=False)
    compute(scheduler, seq)
    batch, preempted = scheduler.schedule()
    assert (batch, preempted) == ([], [seq])
    scheduler.check_integrity()


def test_phases_decide_who_runs() -> None:
    scheduler, _ = make()
    seq = sequence("a", range(4))
    admit(scheduler, seq, awaits_kv=True)
    assert scheduler.running == []
    scheduler.computed(seq, 4)
    seq.tokens.append(9)
    scheduler.set_phase(seq, Phase.RUNNING)
    batch, _ = scheduler.schedule()
    assert [(s.sequence.id, s.count, s.samples) for s in batch] == [("a", 1, True)]
    scheduler.set_phase(seq, Phase.CLOSING)
    assert scheduler.schedule() == ([], [])
    scheduler.release(seq)
    assert "a" not in scheduler
    scheduler.check_integrity()


def test_prompts_are_chunked_under_the_budget() -> None:
    scheduler, _ = make(max_num_batched_tokens=5)
    seq = sequence("a", range(12))
    admit(scheduler, seq)
    counts = []
    while seq.in_prefill:
        [scheduled], _ = scheduler.schedule()
        counts.append((scheduled.count, scheduled.samples))
        scheduler.computed(seq, scheduled.count)
    assert counts == [(5, False), (5, False), (2, True)]


def test_a_cached_prompt_that_fills_the_pool_is_admitted_again() -> None:
    """There is no room for the last page beside its copy: it is computed instead, and nobody waits for ever."""
    scheduler, pages = make(num_blocks=16, lookahead_tokens=4)
    first = sequence("a", range(60), max_tokens=4)
    admit(scheduler, first)
    compute(scheduler, first)
    scheduler.release(first)
    again = sequence("b", range(60), max_tokens=4)
    admit(scheduler, again)
    assert (again.num_cached, pages.copies) == (56, [])
    scheduler.release(again)
    scheduler.check_integrity()


def test_steps_with_prompts_are_short_once_answers_join_from_elsewhere() -> None:
    """By the shortest target of those, for a while: the next one may be on its way to a prefill worker."""
    scheduler, _ = make(num_blocks=20, max_num_batched_tokens=64)
    speed = Speed(token=1e-3, prompts=ENOUGH, answers=ENOUGH)
    admit(scheduler, sequence("b", range(60)))
    assert [scheduled.count for scheduled in scheduler.schedule(speed)[0]] == [60]
    for target in (0.09 / SHARE, None):  # in seconds
        spec = replace(sequence("a", range(70, 72)).spec, itl_target=target)
        guest = Sequence("a", spec, 1)
        admit(scheduler, guest, awaits_kv=True)
        for _ in range(2):  # while it is awaited, and when it is gone
            assert [scheduled.count for scheduled in scheduler.schedule(speed)[0]] == [45]
            if guest.id in scheduler:
                scheduler.release(guest)
    counts = [scheduler.schedule(speed)[0][0].count for _ in range(JOINED)]
    assert counts == [45] * (JOINED - 4) + [60] * 4
