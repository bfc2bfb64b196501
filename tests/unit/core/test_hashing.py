"""Block hashes are the same everywhere, and differ wherever the KV would."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.hashing import block_hashes, extend_hashes, root_hash
from pdserve.core.layout import KVLayout

LAYOUT = KVLayout(4, 2, 2, 8, "float32", b"f" * 16)


def test_known_value() -> None:
    """Pinned: a change of the scheme would silently split caches between versions."""
    assert root_hash(LAYOUT, "salt").hex() == "96c18f5f689a98cb29bb3868ff50b3f7"
    assert [h.hex() for h in block_hashes(root_hash(LAYOUT), range(9), 4)] == [
        "b398b8a2ea2de54f61305b0f3518e75f",
        "d77ef1fba5b3b5304287d5ec58ea3b6e",
    ]


def test_another_process_gets_the_same() -> None:
    code = (
        "from pdserve.core.hashing import *; from pdserve.core.layout import KVLayout;"
        "print(block_hashes(root_hash(KVLayout(4, 2, 2, 8, 'float32', b'f' * 16)), range(9), 4)[-1].hex())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == block_hashes(root_hash(LAYOUT), range(9), 4)[-1].hex()


def test_whatever_decides_the_kv_decides_the_root() -> None:
    others = [
        root_hash(replace(LAYOUT, model_fingerprint=b"g" * 16)),
        root_hash(replace(LAYOUT, block_size=8)),
        root_hash(replace(LAYOUT, dtype="bfloat16")),
        root_hash(LAYOUT, "key"),
    ]
    assert len({root_hash(LAYOUT), *others}) == 5


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(0, 40), st.integers(1, 7))
def test_extending_equals_starting_over(tokens: list[int], cut: int, size: int) -> None:
    root = root_hash(LAYOUT)
    hashes = block_hashes(root, tokens[:cut], size)
    extend_hashes(hashes, root, tokens, size)
    assert hashes == block_hashes(root, tokens, size)
    assert len(hashes) == len(tokens) // size


@given(st.lists(st.integers(0, 9), min_size=8, max_size=8), st.integers(0, 7))
def test_a_changed_token_changes_its_block_and_all_after(tokens: list[int], index: int) -> None:
    changed = [*tokens[:index], tokens[index] + 1, *tokens[index + 1 :]]
    before, after = (block_hashes(root_hash(LAYOUT), t, 2) for t in (tokens, changed))
    assert [a == b for a, b in zip(before, after, strict=True)] == [block < index // 2 for block in range(4)]
