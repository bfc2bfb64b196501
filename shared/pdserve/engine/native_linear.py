"""Matrix products by a kernel in C, on matrices in its own order and in huge pages, for any number of rows.

With few rows a product is as fast as its matrix is read, and a core reads fastest from the first byte to the last,
in huge pages. With many it is as fast as a core multiplies: 235 GFLOP/s in bfloat16 on the one below. Measured on one
core of an EPYC with AVX512-BF16, SmolLM2's layers, ms (oneDNN packed, this), by turns in one run: in bfloat16 1 row
14.6 and 6.7, 8 rows 16.4 and 9.6, 32 rows 38 and 32.5, 512 rows 510 and 545; in float32 29.9 and 15.0, 31 and 18,
72 and 64, 1,038 and 1,038.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from pathlib import Path

import torch

from pdserve.core.errors import ConfigError
from pdserve.engine.linear import Matrices, TorchMatrices, packs
from pdserve.engine.native import build as native
from pdserve.engine.native.build import NativeError

SOURCE = Path(native.__file__).with_name("linear.c")
HUGE_PAGE = 2 << 20  # bytes
ARENA = 32 * HUGE_PAGE
LINE = 64  # bytes


class NativeMatrices:
    """See `Matrices`. Raises ConfigError for a dtype that the kernel does not take, NativeError where it cannot be
    compiled."""

    gives_rows = True

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(f"native products take float32 and bfloat16, not {str(dtype).removeprefix('torch.')}")
        defines = {"HEAD": 16, "KV_HEADS": 1, "GROUP": 1, "BLOCK": 1, "BFLOAT16": int(dtype == torch.bfloat16)}
        library = native.load(SOURCE, defines)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._linear, self._pack, self._take_rows = library.linear, library.pack, library.take_rows
        self._packed_size = library.packed_size
        self._linear.argtypes = [pointer, number, pointer, pointer, number, number, number, pointer]
        self._pack.argtypes = [pointer, number, number, pointer]
        self._take_rows.argtypes = [pointer, number, number, pointer, number, pointer]
        self._packed_size.argtypes = [number, number]
        self._linear.restype = self._pack.restype = None
        self._packed_size.restype = number
        self._dtype = dtype
        self._arena = torch.empty(0, dtype=torch.uint8)

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        weight = weight.contiguous()  # by name: it has to be there until the call is over
        room = self._room(self._packed_size(*weight.shape) * weight.itemsize).view(self._dtype)
        self._pack(weight.data_ptr(), *weight.shape, room.data_ptr())
        return room[: weight.numel()].view(weight.shape)  # whatever the kernel put behind it

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows, (outputs, inputs) = x.shape[0], weight.shape
        assert x.shape[1] == inputs and x.dtype == self._dtype  # the kernel reads what it is pointed to
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty((rows, outputs))
        offsets = None if bias is None else bias.data_ptr()
        self._linear(x.data_ptr(), x.stride(0), weight.data_ptr(), offsets, rows, inputs, outputs, out.data_ptr())
        return out

    def rows(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert ids.dtype == torch.int64
        ids = ids.contiguous()
        out = weight.new_empty((len(ids), weight.shape[1]))
        if self._take_rows(weight.data_ptr(), *weight.shape, ids.data_ptr(), len(ids), out.data_ptr()):
            raise IndexError(f"an id is not below {len(weight)}")
        return out

    def _room(self, size: int) -> torch.Tensor:
        """Zeros, uint8 [size], that begin with a cache line. Matrices share arenas, as most are small."""
        needed = -(-size // LINE) * LINE
        if len(self._arena) < needed:
            self._arena = in_huge_pages(max(ARENA, -(-needed // HUGE_PAGE) * HUGE_PAGE))
        room, self._arena = self._arena[:size], self._arena[needed:]
        return room


def choose_matrices(attention: str, dtype: torch.dtype, device: torch.device) -> tuple[Matrices | None, str]:
    """How matrices are packed, None: not at all; and why. The kernel goes with attention's, where it is faster."""
    packed, order = packs(dtype, device)
    fallback = TorchMatrices() if packed else None
    if attention != "native":
        return fallback, order
    if not _is_faster(dtype):
        return fallback, f"{order}: the kernel of our own is for AVX512, in bfloat16 with AVX512-BF16 and without AMX"
    try:
        return NativeMatrices(dtype), "native, as attention is"
    except (ConfigError, NativeError) as error:
        return fallback, f"{order}: {error}"


def _is_faster(dtype: torch.dtype) -> bool:
    """Its tiles want 32 registers of 512 bits, and an instruction for bfloat16; with AMX oneDNN is for that."""
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return False
    instruction = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()
    return dtype == torch.float32 or (dtype == torch.bfloat16 and instruction)


def in_huge_pages(size: int) -> torch.Tensor:
    """uint8 [size], of whole huge pages where the kernel has them. Memory is taken as it is first written."""
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: slower, and no less right
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + size]
