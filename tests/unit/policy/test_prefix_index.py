"""The index against a plain model of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.policy.prefix_index import PrefixIndex

HASHES = [bytes([number]) * 16 for number in range(9)]
# A cache has beginnings: holder, and how many blocks it has by then; None: it is gone.
moves = st.lists(st.tuples(st.sampled_from("abcd"), st.one_of(st.none(), st.integers(0, len(HASHES)))), max_size=12)


@given(moves, st.integers(0, len(HASHES)))
def test_it_agrees_with_counting(moves: list[tuple[str, int | None]], asked: int) -> None:
    index, model = PrefixIndex(), dict[str, int]()
    for holder, count in moves:
        if count is None:
            index.drop(holder)
            model.pop(holder, None)
        else:
            index.update(holder, HASHES[:count], HASHES[count:])
            model[holder] = count
    assert index.leading(HASHES[:asked]) == {
        holder: min(count, asked) for holder, count in model.items() if count and asked
    }
    assert len(index) == max(model.values(), default=0)
    assert all(index.holds(holder) == count for holder, count in model.items())


def test_a_hash_that_is_in_both_lists_counts_as_removed() -> None:
    index = PrefixIndex()
    index.update("a", HASHES[:3], HASHES[2:])
    assert index.leading(HASHES) == {"a": 2}


def test_a_holder_is_bounded_and_its_oldest_blocks_go_first() -> None:
    index = PrefixIndex(limit=3)
    index.update("a", HASHES[:5], ())
    assert index.leading(HASHES[2:]) == {"a": 3} and index.leading(HASHES) == {} and len(index) == 3
    index.update("a", HASHES[5:6], (), limit=2)
    assert index.holds("a") == 2


def test_a_place_that_became_free_is_used_again_and_holds_nothing() -> None:
    index = PrefixIndex()
    index.update("a", HASHES, ())
    index.update("b", HASHES[:2], ())
    index.drop("a")
    index.update("c", HASHES[1:3], ())
    assert index.leading(HASHES) == {"b": 2} and index.leading(HASHES[1:]) == {"b": 1, "c": 2}
    index.drop("nobody")
