"""Packed matrices multiply as plain ones do, whatever the number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pdserve.engine.linear import linear, pack, packs

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16, torch.float16) if packs(dtype, torch.device("cpu"))[0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 33])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_equals_plain(dtype, rows, bias):
    generator = torch.Generator().manual_seed(rows)
    x, weight, offset = (torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, 48), (80, 48), (80,)))
    want = F.linear(x.double(), weight.double(), offset.double() if bias else None)
    got = linear(x, pack(weight), offset if bias else None)
    assert got.shape == (rows, 80) and got.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def test_rows_that_are_not_contiguous():
    x = torch.randn(8, 96)[::2, :48]
    weight = torch.randn(80, 48)
    if packs(torch.float32, torch.device("cpu"))[0]:
        torch.testing.assert_close(linear(x, pack(weight)), F.linear(x, weight), rtol=1e-5, atol=1e-5)


def test_the_reason_is_told():
    assert packs(torch.bfloat16, torch.device("cuda")) == (False, "plain: the device is cuda")
    chosen, reason = packs(torch.float32, torch.device("cpu"))
    assert reason.startswith("packed" if chosen else "plain")
