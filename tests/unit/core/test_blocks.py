"""The block pool keeps its books under any order of operations."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.core.blocks import BlockPool
from pdserve.core.errors import IntegrityError, NoCapacity

NUM_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """Tables of a plain model against the pool: whatever happens, every block is free, cached or owned, never two."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.hash_of: dict[int, bytes] = {}
        self.known: set[bytes] = set()

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        available = self.pool.num_available
        if count > available:
            with pytest.raises(NoCapacity):
                self.pool.allocate(count)
            assert self.pool.num_available == available
            return
        table = self.pool.allocate(count)
        assert len(set(table)) == count
        assert not set(table) & {block for other in self.tables for block in other}
        for block in table:
            self.known.discard(self.hash_of.pop(block, b""))
        self.tables.append(table)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), digest=st.integers(0, 5))
    def publish(self, data: st.DataObject, digest: int) -> None:
        block = data.draw(st.sampled_from(sorted({b for table in self.tables for b in table})))
        key = bytes([digest])
        self.pool.publish(block, key)
        if key not in self.known and block not in self.hash_of:
            self.hash_of[block] = key
            self.known.add(key)
        expected = [b for b, h in self.hash_of.items() if h == key]
        assert self.pool.match([key]) == expected

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.known)))
        blocks = self.pool.match([key])
        assert len(blocks) == 1
        self.pool.acquire(blocks)
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)

    @rule()
    def clear_cache(self) -> None:
        owned = {b for table in self.tables for b in table}
        self.pool.clear_cache()
        self.hash_of = {b: h for b, h in self.hash_of.items() if b in owned}
        self.known = set(self.hash_of.values())

    @invariant()
    def books_add_up(self) -> None:
        self.pool.check_integrity(self.tables)
        owned = {b for table in self.tables for b in table}
        assert self.pool.num_owned == len(owned)
        assert self.pool.num_cached == len(set(self.hash_of) - owned)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_least_recently_used_goes_first_and_tails_before_heads() -> None:
    """Of two cached chains the older one is evicted first, and of one chain its last block."""
    pool = BlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    for index, block in enumerate([*old, *new]):
        pool.publish(block, bytes([index]))
    pool.release(old)
    pool.release(new)
    pool.take_changes()
    pool.allocate(3)
    assert pool.take_changes() == ([], [b"\x01", b"\x00", b"\x03"])


def test_a_block_with_two_owners_is_cached_only_after_both_let_go() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.publish(table[0], b"h")
    pool.acquire(table)
    pool.release(table)
    assert (pool.num_owned, pool.num_cached) == (1, 0)
    pool.release(table)
    assert (pool.num_owned, pool.num_cached, pool.num_free) == (0, 1, 1)


def test_integrity_names_a_leaked_block() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(IntegrityError, match=r"blocks \[0\] have references that no table accounts for"):
        pool.check_integrity([])


def test_releasing_twice_is_an_error() -> None:
    pool = BlockPool(1)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(IntegrityError, match="released more often"):
        pool.release(table)


def test_a_hash_stored_and_evicted_between_two_looks_is_told_as_it_ended() -> None:
    """Told as stored, it would stay for ever in the index of whoever follows."""
    pool = BlockPool(1)
    [block] = pool.allocate(1)
    pool.publish(block, b"a")
    pool.release([block])
    pool.allocate(1)
    assert pool.match([b"a"]) == []
    assert pool.take_changes() == ([], [b"a"])
    pool.publish(block, b"a")
    assert pool.take_changes() == ([b"a"], [])
