"""One byte a number and back, within the stated error."""

from __future__ import annotations

import pytest
import torch

from pdserve.transfer.quantize import CODES, dequantize, error_bound, quantize

BLOCKS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 50.0])
def test_the_error_is_within_its_bound(kind: str, dtype: torch.dtype, magnitude: float) -> None:
    """Per block and head: int8 by its largest number, fp8 by the number itself; plus the pages' own rounding."""
    generator = torch.Generator().manual_seed(3)
    data = (torch.randn(3, 2, 8, 2, 16, generator=generator) * magnitude).to(dtype)
    codes, scales = quantize(data, kind, BLOCKS)
    assert codes.dtype is CODES[kind][0] and codes.shape == data.shape and scales.shape == (3, 2, 3, 2)
    back = dequantize(codes, scales, BLOCKS, dtype)
    assert back.dtype is dtype
    exact, error = data.double(), (back.double() - data.double()).abs()
    rounding = torch.finfo(dtype).eps * exact.abs() + 1e-12
    step = scales.double()[:, :, BLOCKS].unsqueeze(-1)
    allowed = step / 2 if kind == "int8" else torch.maximum(exact.abs() / 16, step / 512)
    assert (error <= allowed * 1.0001 + rounding).all()
    assert error.max() <= error_bound(scales, kind) * 1.0001 + rounding.max()


def test_a_scale_belongs_to_one_block_and_head() -> None:
    """A large number costs precision in its own block and head, and nowhere else."""
    data = torch.ones(1, 2, 8, 2, 4)
    data[0, 1, 4, 1, 2] = 1000.0
    _, scales = quantize(data, "int8", BLOCKS)
    large = scales > 1
    assert large.sum() == 1 and large[0, 1, 1, 1]


def test_the_largest_number_of_a_block_comes_back() -> None:
    """Codes reach the end of their range: no sign lost, nothing clipped."""
    data = torch.tensor([-3.0, 3.0, 0.5, 0.0]).view(1, 1, 1, 1, 4).repeat(1, 2, 1, 1, 1)
    for kind, (_, largest) in CODES.items():
        codes, scales = quantize(data, kind, torch.tensor([0]))
        assert codes.float().abs().max() == largest
        back = dequantize(codes, scales, torch.tensor([0]), torch.float32)
        torch.testing.assert_close(back[..., :2], data[..., :2])


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_numbers_too_small_for_a_scale_become_zeros(kind: str) -> None:
    """And never something that is no number."""
    data = torch.full((1, 2, 1, 1, 4), 1e-37)
    back = dequantize(*quantize(data, kind, torch.tensor([0])), torch.tensor([0]), torch.float32)
    assert back.isfinite().all() and (back - data).abs().max() <= 2e-37
