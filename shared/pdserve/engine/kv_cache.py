"""The paged KV cache: one tensor. Who owns which block is the block pool's business."""

from __future__ import annotations

import contextlib
import math
import mmap
from itertools import pairwise

import numpy as np
import torch

from pdserve.core.errors import ConfigError
from pdserve.core.layout import KVLayout

_RUN_BYTES = 64 << 10


class KVCache:
    """K and V of all layers in `data` [num_layers, 2, num_blocks * block_size, num_kv_heads, head_size].

    Slot s is token s % block_size of block s // block_size. Neighbouring blocks are neighbours in memory, so a run of
    them is a plain view. Starts as zeros (on a CPU, memory is taken as it is first written): attention reads past the
    end of a sequence in its last block and masks what it finds there, which must not be NaN.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device | str) -> None:
        if num_blocks < 1:
            raise ConfigError(
                f"a KV cache needs 1 block or more, not {num_blocks}; a block takes {layout.block_bytes} bytes"
            )
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = layout.block_size
        self.dtype: torch.dtype = getattr(torch, layout.dtype)
        shape = (layout.num_layers, 2, num_blocks * layout.block_size, layout.num_kv_heads, layout.head_size)
        self.data = _zeros(shape, self.dtype, torch.device(device))
        self.device = self.data.device

    @staticmethod
    def num_blocks_for(memory_bytes: int, layout: KVLayout) -> int:
        """How many blocks fit."""
        return memory_bytes // layout.block_bytes

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of one layer's K and V, each [num_slots, num_kv_heads, head_size]."""
        keys, values = self.data[index].unbind(0)
        return keys, values

    def append(self, index: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store one layer's K and V, each [n, num_kv_heads, head_size], at int64 slots [n]."""
        k, v = self.layer(index)
        k.index_copy_(0, slots, keys)
        v.index_copy_(0, slots, values)

    def read(
        self, layer_start: int, layer_count: int, slots: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A contiguous copy [layer_count, 2, n, num_kv_heads, head_size] of int64 slots [n]; into `out` when given."""
        layers = self.data[layer_start : layer_start + layer_count]
        if out is None:
            return layers.index_select(2, slots)
        runs = _runs(slots, out)
        if runs is None:
            return torch.index_select(layers, 2, slots, out=out)
        for start, slot, count in runs:
            out[:, :, start : start + count].copy_(layers[:, :, slot : slot + count])
        return out

    def write(self, layer_start: int, slots: torch.Tensor, data: torch.Tensor) -> None:
        """Store `data`, of the shape that `read` returns, from `layer_start` on at int64 slots [n]."""
        layers = self.data[layer_start : layer_start + data.shape[0]]
        runs = _runs(slots, data)
        if runs is None:
            layers.index_copy_(2, slots, data)
            return
        for start, slot, count in runs:
            layers[:, :, slot : slot + count].copy_(data[:, :, start : start + count])


def _runs(slots: torch.Tensor, data: torch.Tensor) -> list[tuple[int, int, int]] | None:
    """Runs of neighbouring slots as (start in `data`, first slot, length), where copying them as such is faster.

    Measured on a CPU: runs are copied at 26 GB/s, single slots gathered at 5 and scattered at 2.3, and each run costs
    what 64 KiB of scattering do. On a GPU slots are read on the device, so None there.
    """
    if slots.device.type != "cpu" or not len(slots):
        return None
    numbers = slots.numpy()
    ends = np.flatnonzero(np.diff(numbers) != 1)
    if len(ends) and (len(ends) + 1) * _RUN_BYTES > data.nbytes:
        return None
    starts = [0, *(ends + 1).tolist(), len(numbers)]
    return [(start, int(numbers[start]), end - start) for start, end in pairwise(starts)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros whose memory, on a CPU, is taken only as it is first written: torch's own are written at once.

    In small pages. A token writes to a place in each layer, so the first one past the end of a huge page takes as many
    new ones as there are layers, at once: 120 MB and 180 to 300 ms for SmolLM2 on a virtual machine, a gap in every
    answer. Small ones cost a step a fiftieth of its time.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them has none to give
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
