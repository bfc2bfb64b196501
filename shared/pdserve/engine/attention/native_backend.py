"""Attention on CPUs by kernels in C that read pages in place: decodes, and prefills where that beats torch's.

PyTorch's attention takes each sequence and KV head by itself, at some 4 us, after a copy of scattered pages. Measured
on one core of an EPYC with AVX512-BF16, SmolLM2's shapes in bfloat16, us a layer (torch, this): decodes of 32 sequences
with 160 tokens 1,220 and 330, 8 with 1,024 1,800 and 470, 1 with 160 45 and 15; prompts of 1,024 tokens 25,600 and
11,300, of 2,048 85,300 and 42,800 (float32: 24,400 and 16,600, 87,200 and 65,800).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from pdserve.core.errors import ConfigError
from pdserve.engine.attention.base import AttentionMetadata, HeadShape, SequenceChunk, slots_of
from pdserve.engine.attention.plan import Prefill, plan_prefill, touched
from pdserve.engine.attention.torch_backend import attend_prefill
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.native import build as native

FOLDER = Path(native.__file__).parent
LANES = 16  # of the kernels' vectors
MAX_HEAD, MAX_GROUP = 256, 32  # what one sequence's sums may take of the stack and of a core's registers
NO_WINDOW = 1 << 40  # tokens


@dataclass(frozen=True, slots=True)
class Decodes:
    """A step's decodes as the kernel takes them, all int64: `rows` of the batch [B], block `tables` one after another,
    where each begins in them, and the `first` and past the `last` of its tokens that each sees [B]."""

    rows: torch.Tensor
    tables: torch.Tensor
    starts: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prefill's chunk as the kernel takes it: its first row in the batch, its length, and its whole block `table`."""

    start: int
    query_len: int
    context_len: int
    table: torch.Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """Prefills are `prompts` for the kernel or `prefills` for torch, never both."""

    prompts: list[Prompt]
    prefills: list[Prefill]
    decodes: Decodes | None


class NativeMetadata:
    """The step's slots, and its plan for each window size that some layer has; plans are made on first use."""

    def __init__(self, chunks: Sequence[SequenceChunk], kv: KVCache, prefills: bool) -> None:
        self.slots = slots_of(chunks, kv.block_size)
        self._chunks = chunks
        self._prefills = prefills
        self._plans: dict[int | None, Plan] = {}

    def plan(self, kv: KVCache, window: int | None) -> Plan:
        if window not in self._plans:
            self._plans[window] = make_plan(self._chunks, kv, window, self._prefills)
        return self._plans[window]


class Backend:
    """See `AttentionBackend`. Raises ConfigError for a shape or dtype that the kernels do not take, and NativeError
    where they cannot be compiled."""

    name = "native"

    def __init__(self, shape: HeadShape, dtype: torch.dtype, block_size: int) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(f"native attention takes float32 and bfloat16, not {str(dtype).removeprefix('torch.')}")
        group = shape.heads // shape.kv_heads
        if shape.size % LANES or shape.size > MAX_HEAD or group > MAX_GROUP:
            raise ConfigError(
                f"native attention takes heads of a multiple of {LANES} elements up to {MAX_HEAD}, not {shape.size}, "
                f"and up to {MAX_GROUP} heads for each KV head, not {group}"
            )
        self._scale = 1 / math.sqrt(shape.size)
        self._block_size = block_size
        defines = {"HEAD": shape.size, "KV_HEADS": shape.kv_heads, "GROUP": group, "BLOCK": block_size}
        defines["BFLOAT16"] = int(dtype == torch.bfloat16)
        pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        self._decode_kernel = native.load(FOLDER / "decode_attention.c", defines).decode_attention
        self._decode_kernel.restype = None
        self._decode_kernel.argtypes = [pointer, number, pointer, number, *[pointer] * 5, number, real, pointer]
        self._prefills = prefills_natively(dtype)
        if self._prefills:
            self._prefill_kernel = native.load(FOLDER / "prefill_attention.c", defines).prefill_attention
            self._prefill_kernel.argtypes = [pointer, number, pointer, number, pointer, *[number] * 3, real, pointer]

    def check_block_size(self, block_size: int) -> None:
        if block_size != self._block_size:
            raise ConfigError(
                f"native attention was compiled for blocks of {self._block_size} tokens, not {block_size}"
            )

    def build(self, chunks: Sequence[SequenceChunk], kv: KVCache) -> NativeMetadata:
        return NativeMetadata(chunks, kv, self._prefills)

    def forward(
        self,
        layer_index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: KVCache,
        meta: AttentionMetadata,
        window: int | None,
    ) -> torch.Tensor:
        plan = cast(NativeMetadata, meta).plan(kv, window)
        pages = kv.data[layer_index]
        out = torch.empty(q.shape, dtype=q.dtype)
        for prompt in plan.prompts:
            self._prefill(q, pages, prompt, window, out)
        for prefill in plan.prefills:
            out[prefill.start : prefill.end] = attend_prefill(q, k, v, pages, prefill)
        if plan.decodes is not None:
            self._decode(q, pages, plan.decodes, out)
        return out.flatten(1)

    def _prefill(
        self, q: torch.Tensor, pages: torch.Tensor, prompt: Prompt, window: int | None, out: torch.Tensor
    ) -> None:
        """Fill a chunk's rows of `out`; its keys and values are in the pages already. Raises MemoryError."""
        failed = self._prefill_kernel(
            q[prompt.start].data_ptr(),
            q.stride(0),
            pages.data_ptr(),
            pages.stride(0),
            prompt.table.data_ptr(),
            prompt.query_len,
            prompt.context_len,
            window or NO_WINDOW,
            self._scale,
            out[prompt.start].data_ptr(),
        )
        if failed:
            raise MemoryError("no memory for a prompt's attention")

    def _decode(self, q: torch.Tensor, pages: torch.Tensor, decodes: Decodes, out: torch.Tensor) -> None:
        """Fill the decodes' rows of `out` [T, heads, size], from q of that shape, each of whose rows is contiguous."""
        self._decode_kernel(
            q.data_ptr(),
            q.stride(0),
            pages.data_ptr(),
            pages.stride(0),
            decodes.rows.data_ptr(),
            decodes.tables.data_ptr(),
            decodes.starts.data_ptr(),
            decodes.first.data_ptr(),
            decodes.last.data_ptr(),
            len(decodes.rows),
            self._scale,
            out.data_ptr(),
        )


def prefills_natively(dtype: torch.dtype) -> bool:
    """Whether the prefill kernel is the faster one: its tiles want 32 registers of 512 bits, and AMX is torch's."""
    wide = "AVX512" in torch.backends.cpu.get_cpu_capability()
    return wide and not (dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported())


def make_plan(chunks: Sequence[SequenceChunk], kv: KVCache, window: int | None, natively: bool) -> Plan:
    """`natively`: whether prefills are the kernel's."""
    prompts: list[Prompt] = []
    prefills: list[Prefill] = []
    rows: list[int] = []
    tables: list[int] = []
    bounds: list[tuple[int, int, int]] = []
    row = 0
    for chunk in chunks:
        query_len, context_len, table = chunk
        if query_len == 1:
            blocks, first, last = touched(chunk, kv.block_size, window)
            bounds.append((len(tables), first, last))
            tables.extend(blocks)
            rows.append(row)
        elif natively:
            prompts.append(Prompt(row, query_len, context_len, torch.tensor(table, dtype=torch.int64)))
        else:
            prefills.append(plan_prefill(row, chunk, kv, window))
        row += query_len
    if not rows:
        return Plan(prompts, prefills, None)
    starts, first_seen, ends = torch.tensor(bounds).t().contiguous().unbind(0)
    return Plan(prompts, prefills, Decodes(torch.tensor(rows), torch.tensor(tables), starts, first_seen, ends))
