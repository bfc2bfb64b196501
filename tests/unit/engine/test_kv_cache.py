"""The cache's reads and writes are exact copies of what attention stored."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from pdserve.core.errors import ConfigError
from pdserve.core.layout import KVLayout
from pdserve.engine.kv_cache import KVCache

LAYOUT = KVLayout(4, 3, 2, 8, "bfloat16", bytes(16))


def filled() -> KVCache:
    kv = KVCache(LAYOUT, 5, "cpu")
    kv.data.copy_(torch.randn(kv.data.shape))
    return kv


def test_blocks_fit_by_their_bytes():
    assert LAYOUT.block_bytes == 4 * 3 * 2 * 2 * 8 * 2
    assert KVCache.num_blocks_for(10 * LAYOUT.block_bytes - 1, LAYOUT) == 9
    kv = KVCache(LAYOUT, 5, "cpu")
    assert kv.data.nbytes == 5 * LAYOUT.block_bytes and kv.data.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="1 block or more"):
        KVCache(LAYOUT, 0, "cpu")


def test_read_into_a_buffer_and_write_elsewhere_move_the_tokens():
    source, target = filled(), filled()
    slots, others = torch.tensor([3, 19, 0]), torch.tensor([7, 6, 5])
    out = torch.empty(2, 2, 3, 2, 8, dtype=torch.bfloat16)
    data = source.read(1, 2, slots, out)
    assert data is out and data.is_contiguous() and torch.equal(data, source.read(1, 2, slots))
    before = target.data.clone()
    target.write(1, others, data)
    assert torch.equal(target.data[1:, :, others], source.data[1:, :, slots])
    untouched = [slot for slot in range(20) if slot not in (5, 6, 7)]
    assert torch.equal(target.data[:, :, untouched], before[:, :, untouched]) and torch.equal(target.data[0], before[0])


def test_append_stores_one_layer():
    kv = filled()
    keys, values = torch.randn(2, 2, 2, 8).bfloat16()
    kv.append(2, torch.tensor([9, 4]), keys, values)
    k, v = kv.layer(2)
    assert torch.equal(k[[9, 4]], keys) and torch.equal(v[[9, 4]], values)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not say what a process takes")
def test_growing_into_new_memory_takes_little_of_it_at_once() -> None:
    """A token in each of 64 layers' K and V touches 128 places: half a megabyte of small pages, 256 of huge ones."""
    layout = KVLayout(16, 64, 1, 64, "float32", bytes(16))
    kv = KVCache(layout, 4096, "cpu")
    before = resident_bytes()
    kv.data[:, :, 0] = 1.0
    assert kv.data[:, :, 1].count_nonzero() == 0
    assert resident_bytes() - before < 16 << 20
