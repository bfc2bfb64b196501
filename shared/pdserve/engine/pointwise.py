"""What stands between a layer's matrix products: norms, gates, rotations. By torch anywhere, on CPUs by kernels in C.

Torch takes nine operations for a norm and five for a rotation, each a pass over memory and 1 to 3 us of calling.
Measured on one core of an EPYC, SmolLM2 in bfloat16: a step of one token was 30 ms and is 24, a prompt of 1,024 tokens
was 1,530 and is 1,470.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from pdserve.core.errors import ConfigError
from pdserve.engine.attention import HeadShape
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.native import build as native
from pdserve.engine.rope import apply_rope

SOURCE = Path(native.__file__).with_name("pointwise.c")
LANES = 16  # of the kernels' vectors


class Rotation(NamedTuple):
    """One step's, for all layers: cos and sin [T, 1, size] in the model's dtype, or positions [T] and the table."""

    first: torch.Tensor
    second: torch.Tensor


class Pointwise(Protocol):
    """All tensors are of the model's dtype and on its device; rows T are the step's tokens."""

    def add_norm(
        self, hidden: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add `added` to hidden [T, width] in place; the root mean square norm of that, times weight [width]."""

    def gate(self, gates: torch.Tensor) -> torch.Tensor:
        """silu of the first half of each row of gates [T, 2 * width], times the second: [T, width]."""

    def rotation(self, positions: torch.Tensor, table: torch.Tensor) -> Rotation:
        """What `rotate` needs for tokens at int64 positions [T], from `rope_table`."""

    def rotate(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """x [T, heads, size] rotated, in place or anew; a token's heads follow one another in memory."""

    def store(self, kv: KVCache, index: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """`KVCache.append` of one layer's keys and values; a token's heads follow one another in memory."""


class TorchPointwise:
    """See `Pointwise`."""

    def add_norm(
        self, hidden: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if added is not None:
            hidden.add_(added)
        return F.rms_norm(hidden, weight.shape, weight, eps)

    def gate(self, gates: torch.Tensor) -> torch.Tensor:
        gate, up = gates.chunk(2, dim=-1)
        return F.silu(gate, inplace=True) * up

    def rotation(self, positions: torch.Tensor, table: torch.Tensor) -> Rotation:
        return Rotation(*table[positions].unsqueeze(2).unbind(1))

    def rotate(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        cos, sin = rotation
        return apply_rope(x, cos.to(x.dtype), sin.to(x.dtype))

    def store(self, kv: KVCache, index: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        kv.append(index, slots, keys, values)


class NativePointwise:
    """See `Pointwise`; widths are multiples of 16. Raises ConfigError for others and for dtypes that the kernels do not
    take, NativeError where they cannot be compiled."""

    def __init__(self, shape: HeadShape, widths: tuple[int, ...], dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.bfloat16) or any(width % LANES for width in (shape.size, *widths)):
            raise ConfigError(f"native kernels take float32 and bfloat16 and widths of a multiple of {LANES}")
        defines = {"HEAD": shape.size, "KV_HEADS": shape.kv_heads, "GROUP": 1, "BLOCK": 1}
        library = native.load(SOURCE, defines | {"BFLOAT16": int(dtype == torch.bfloat16)})
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._add_norm, self._gate = library.add_norm, library.gate
        self._rotate, self._store = library.rotate, library.store_rows
        self._add_norm.argtypes = [pointer, pointer, pointer, ctypes.c_float, number, number, pointer]
        self._gate.argtypes = [pointer, number, number, pointer]
        self._rotate.argtypes = [pointer, number, pointer, pointer, number, number]
        self._store.argtypes = [pointer, number, pointer, pointer, number, pointer, number, number]
        for kernel in (self._add_norm, self._gate, self._rotate, self._store):
            kernel.restype = None

    def add_norm(
        self, hidden: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        out = torch.empty_like(hidden)
        other = None if added is None else added.data_ptr()
        self._add_norm(hidden.data_ptr(), other, weight.data_ptr(), eps, *hidden.shape, out.data_ptr())
        return out

    def gate(self, gates: torch.Tensor) -> torch.Tensor:
        rows, width = gates.shape[0], gates.shape[1] // 2
        out = gates.new_empty((rows, width))
        self._gate(gates.data_ptr(), rows, width, out.data_ptr())
        return out

    def rotation(self, positions: torch.Tensor, table: torch.Tensor) -> Rotation:
        return Rotation(positions, table)

    def rotate(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        positions, table = rotation
        self._rotate(x.data_ptr(), x.stride(0), positions.data_ptr(), table.data_ptr(), x.shape[0], x.shape[1])
        return x

    def store(self, kv: KVCache, index: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        pages = kv.data[index]
        k, v = (keys.data_ptr(), keys.stride(0)), (values.data_ptr(), values.stride(0))
        self._store(pages.data_ptr(), pages.stride(0), slots.data_ptr(), *k, *v, len(slots))
