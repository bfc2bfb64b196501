"""Frames cover what is computed once and in order, and turns are fair in bytes."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.layout import KVLayout
from pdserve.core.ticket import Landing
from pdserve.policy.transfer_plan import DeficitRoundRobin, Frame, Wire, next_frame


def frame(computed: list[int], sent: list[int], size: int = 100, target: int = 0, flush: bool = False) -> Frame | None:
    """With 10 bytes to a token of a layer."""
    return next_frame(computed, sent, wire=Wire(10), max_bytes=size, target_bytes=target, flush=flush)


def test_neighbouring_layers_share_a_frame() -> None:
    """Layers with the same range go together, as many as fit."""
    assert frame([4, 4, 4, 0], [0, 0, 0, 0]) == Frame(0, 2, 0, 4, 80)
    assert frame([4, 4, 4, 0], [4, 4, 2, 0]) == Frame(2, 1, 2, 2, 20)
    assert frame([4, 4, 4, 4], [2, 0, 0, 2], size=1000) == Frame(0, 1, 2, 2, 20)


def test_a_large_layer_is_cut_on_tokens() -> None:
    """What exceeds a frame goes in parts of whole tokens."""
    assert frame([25, 0], [0, 0]) == Frame(0, 1, 0, 10, 100)
    assert frame([25, 0], [20, 0]) == Frame(0, 1, 20, 5, 50)
    assert frame([3, 0], [0, 0], size=29) == Frame(0, 1, 0, 2, 20)


def test_the_oldest_chunk_goes_first() -> None:
    """A layer that was left behind is sent before the next chunk's first one."""
    assert frame([8, 4, 4], [4, 4, 0]) == Frame(2, 1, 0, 4, 40)


@pytest.mark.parametrize(
    ("computed", "sent", "flush", "goes"),
    [
        ([2, 0, 0], [0, 0, 0], False, False),  # the next layer may join
        ([2, 0, 0], [0, 0, 0], True, True),  # nothing more will come
        ([2, 2, 2], [0, 0, 0], False, True),  # the last layer was reported
        ([2, 2, 0], [2, 0, 0], False, False),
        ([5, 0, 0], [0, 0, 0], False, True),  # large enough
        ([5, 3, 3], [3, 3, 2], False, True),  # the oldest chunk is complete
    ],
)
def test_small_layers_wait_for_company(computed: list[int], sent: list[int], flush: bool, goes: bool) -> None:
    """Below the target a frame waits only while something may still join it."""
    assert (frame(computed, sent, target=50, flush=flush) is not None) == goes


def test_a_frame_holds_a_token() -> None:
    """Frames that hold no token of a layer are a setting that cannot work."""
    with pytest.raises(ValueError, match="10 bytes"):
        frame([1], [0], size=9)


@given(
    st.integers(1, 5),
    st.integers(0, 40),
    st.lists(st.integers(1, 40), min_size=1, max_size=6, unique=True),
    st.integers(10, 200),
    st.integers(0, 300),
    st.randoms(use_true_random=False),
)
def test_frames_cover_every_token_of_every_layer_once(
    num_layers: int, held: int, cuts: list[int], size: int, target: int, random: Random
) -> None:
    """Whatever the chunks and whenever frames are asked for, a landing accepts them all and is complete."""
    end = max([*cuts, held])
    landing = Landing(num_layers, held, end)
    computed, sent = [0] * num_layers, [held] * num_layers

    def drain(limit: int, flush: bool = False) -> None:
        for _ in range(limit):
            if (got := frame(computed, sent, size, target, flush)) is None:
                return
            assert 0 < got.bytes == got.layer_count * got.token_count * 10 <= size
            landing.accept(landing.frames, got.layer_start, got.layer_count, got.token_start, got.token_count)
            for layer in range(got.layer_start, got.layer_start + got.layer_count):
                sent[layer] = got.token_start + got.token_count
                assert sent[layer] <= computed[layer]

    for stop in sorted({*cuts, end}):
        for layer in range(num_layers):
            computed[layer] = stop
            drain(random.randint(0, 3))
    drain(10_000)
    assert landing.complete, "a chunk's last layer needs no flush"


@given(st.lists(st.lists(st.integers(1, 100), min_size=1, max_size=30), min_size=2, max_size=6))
def test_turns_are_fair_in_bytes(flows: list[list[int]]) -> None:
    """While two keys both have something to send, they never differ by more than a quantum and a frame."""
    turns, left, served = DeficitRoundRobin(100), dict(enumerate(map(list, flows))), dict.fromkeys(range(len(flows)), 0)
    for key in left:
        turns.add(str(key))
    while (chosen := turns.choose(lambda key: left[int(key)][0] if left[int(key)] else 0)) is not None:
        served[int(chosen)] += left[int(chosen)].pop(0)
        busy = [served[key] for key in left if left[key]]
        assert not busy or max(busy) - min(busy) <= 200
    assert not any(left.values()), "nobody is passed over for ever"


def test_a_key_may_leave_and_come_back() -> None:
    """Leaving gives up what was saved; an empty round chooses nobody."""
    turns = DeficitRoundRobin(10)
    assert turns.choose(lambda key: 10) is None
    for key in "ab":
        turns.add(key)
    assert turns.choose(lambda key: 10) == "a"
    turns.remove("a")
    turns.remove("a")
    assert [turns.choose(lambda key: 10) for _ in range(2)] == ["b", "b"]
    turns.add("a")
    assert {turns.choose(lambda key: 10) for _ in range(2)} == {"a", "b"}
    assert turns.choose(lambda key: 0) is None
    assert len(turns) == 2


@given(
    token=st.integers(1, 64),
    block=st.integers(1, 40),
    overhead=st.integers(0, 64),
    start=st.integers(0, 200),
    limit=st.integers(0, 4000),
)
def test_as_many_tokens_go_as_fit(token: int, block: int, overhead: int, start: int, limit: int) -> None:
    """The most tokens whose bytes, scales included, stay within the limit: one more would not."""
    wire = Wire(token, block, overhead)
    count = wire.tokens_within(start, limit)
    assert count == 0 or wire.bytes(start, count) <= limit
    assert wire.bytes(start, count + 1) > limit


def test_a_quantised_frame_carries_a_scale_for_each_block_it_touches() -> None:
    """One byte a number; four for each block, KV head, and K or V. As it is: the dtype's bytes and nothing more."""
    layout = KVLayout(16, 4, 3, 64, "bfloat16", bytes(16))
    assert Wire.of(layout).bytes(5, 30) == 30 * 768
    wire = Wire.of(replace(layout, transfer_dtype="int8"))
    assert wire.bytes(0, 16) == 16 * 384 + 24
    assert wire.bytes(15, 2) == 2 * 384 + 2 * 24
    assert wire.bytes(5, 30) == 30 * 384 + 3 * 24
    found = next_frame([40, 40, 0, 0], [15, 15, 0, 0], wire=wire, max_bytes=20000)
    assert found == Frame(0, 2, 15, 25, 2 * (25 * 384 + 3 * 24))
