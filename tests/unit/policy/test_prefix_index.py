"""The index against a plain model of it."""

from __future__ import annotations

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from pdserve.policy.prefix_index import PrefixIndex

HASHES = [bytes([number]) * 16 for number in range(6)]
hashes = st.lists(st.sampled_from(HASHES), max_size=6)
moves = st.lists(
    st.one_of(st.tuples(st.sampled_from("abc"), hashes, hashes), st.tuples(st.sampled_from("abc"))), max_size=12
)


@given(moves, hashes)
def test_it_agrees_with_sets(
    moves: list[tuple[str, ...] | tuple[str, list[bytes], list[bytes]]], asked: list[bytes]
) -> None:
    index = PrefixIndex()
    model: dict[str, set[bytes]] = {}
    for move in moves:
        if len(move) == 3:
            holder, stored, removed = move
            assert not isinstance(stored, str) and not isinstance(removed, str)
            index.update(holder, stored, removed)
            model[holder] = (model.get(holder, set()) | set(stored)) - set(removed)
        else:
            index.drop(move[0])
            model.pop(move[0], None)
    counts = {holder: len(list(takewhile(held.__contains__, asked))) for holder, held in model.items()}
    assert index.leading(asked) == {holder: count for holder, count in counts.items() if count}
    assert len(index) == len(set().union(*model.values()))


def test_a_holder_is_bounded_and_its_oldest_blocks_go_first() -> None:
    index = PrefixIndex(limit=3)
    index.update("a", HASHES[:5], ())
    assert index.leading(HASHES[2:]) == {"a": 3} and index.leading(HASHES) == {} and len(index) == 3


def test_a_place_that_became_free_is_used_again_and_holds_nothing() -> None:
    index = PrefixIndex()
    index.update("a", HASHES, ())
    index.update("b", HASHES[:2], ())
    index.drop("a")
    index.update("c", HASHES[1:3], ())
    assert index.leading(HASHES) == {"b": 2} and index.leading(HASHES[1:]) == {"b": 1, "c": 2}
    index.drop("nobody")
