"""Products with the model's matrices: on a CPU in the order that oneDNN multiplies in, reordered once at loading.

A plain matrix is put in that order anew in every call. Measured on one core of an EPYC with AVX512-BF16, SmolLM2's
layers in bfloat16, GB of weights a second (a core reads 24): 1 row 5.5 by torch.mv, 8.1 plain, 12.6 packed, 17 packed
and 4 rows; 8 rows 6.6 plain and 12.1 packed; 32 rows 3.8 and 5.1, which is 0.8 of what the core can multiply.
"""

from __future__ import annotations

import platform
from typing import Protocol

import torch
import torch.nn.functional as F

# Fewer rows take a kernel that is slower than that for four (see above), on the same weights.
_FEWEST_ROWS = 4


def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether matrix products in bfloat16 or float16 run on this CPU's vector units, as oneDNN sees it."""
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and supported[dtype]())


def packs(dtype: torch.dtype, device: torch.device) -> tuple[bool, str]:
    """Whether `pack` reorders matrices of this dtype here, and why."""
    if device.type != "cpu":
        return False, f"plain: the device is {device.type}"
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False, "plain: torch has no oneDNN for this CPU"
    if dtype != torch.float32 and not cpu_multiplies(dtype):
        return False, f"plain: this CPU has no fast {str(dtype).removeprefix('torch.')}"
    return True, "packed for oneDNN"


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A copy of [out, in] in oneDNN's order: as large, opaque, and of use to `linear` alone."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, in] times a plain or packed weight [out, in], plus bias: [T, out]."""
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    rows = x.shape[0]
    if rows < _FEWEST_ROWS:
        x = x.expand(_FEWEST_ROWS, -1) if rows == 1 else F.pad(x, (0, 0, 0, _FEWEST_ROWS - rows))
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product[:rows]


class Matrices(Protocol):
    """How a model's matrices [out, in] are kept and multiplied. What `pack` returns is of use to the others alone."""

    gives_rows: bool  # whether `rows` takes what is packed

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """A copy in the order that products read."""

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] times a weight, plus bias: [T, out]."""

    def rows(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The rows of a weight at int64 ids [T]: [T, in]. Raises IndexError for an id that is none."""


class TorchMatrices:
    """See `Matrices`: plain, or packed for oneDNN where `packs` says so."""

    gives_rows = False

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return pack(weight)

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, weight, bias)

    def rows(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, weight)
