"""The kernel's products and rows are those of the plain matrix, whatever the shapes, rows, threads and machine."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F

from pdserve.core.errors import ConfigError
from pdserve.engine import native_linear
from pdserve.engine.linear import TorchMatrices
from pdserve.engine.native_linear import NativeMatrices, choose_matrices

compiles = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
SHAPES = [(16, 32), (80, 48), (37, 33), (5, 7), (64, 96), (1, 1), (19, 16), (520, 272)]  # outputs, inputs


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def matrices(machine, dtype):
    """The kernel, as this machine and as lesser ones would have it."""
    return NativeMatrices(dtype)


def draw(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@compiles
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_are_the_plain_matrix_s(matrices, dtype, threads, outputs, inputs):
    weight = draw(outputs, inputs, dtype=dtype, seed=1)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 33, 64, 67, 130):
        x = draw(rows, inputs, dtype=dtype)
        for bias in (None, draw(outputs, dtype=dtype, seed=2)):
            want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
            got = matrices.product(x, matrices.pack(weight), bias)
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * inputs**0.5)


@compiles
def test_a_row_depends_on_nothing_but_itself(matrices, dtype, threads):
    x, packed = draw(130, 272, dtype=dtype), matrices.pack(draw(88, 272, dtype=dtype, seed=1))
    alone = torch.cat([matrices.product(row[None], packed) for row in x])
    for rows in (2, 3, 4, 7, 8, 67, 130):
        assert torch.equal(matrices.product(x[:rows], packed), alone[:rows])
    assert torch.equal(matrices.product(x[5:], packed), alone[5:])


@compiles
def test_rows_of_a_packed_matrix(matrices, dtype):
    for outputs, inputs in SHAPES:
        weight = draw(outputs, inputs, dtype=dtype)
        ids = torch.tensor([outputs - 1, 0, outputs // 2, outputs - 1])
        packed = matrices.pack(weight)
        assert torch.equal(matrices.rows(ids, packed), weight[ids])
        for wrong in (-1, outputs):
            with pytest.raises(IndexError, match="not below"):
                matrices.rows(torch.tensor([0, wrong]), packed)


@compiles
def test_rows_that_are_not_contiguous(matrices, dtype):
    weight, wide = draw(80, 48, dtype=dtype), draw(8, 96, dtype=dtype, seed=1)
    packed = matrices.pack(weight)
    for x in (wide[::2, :48], wide[:, ::2]):
        assert torch.equal(matrices.product(x, packed), matrices.product(x.contiguous(), packed))


@compiles
def test_matrices_do_not_overlap(dtype, monkeypatch):
    """In arenas that hold a few of them, and one of its own for what is larger."""
    monkeypatch.setattr(native_linear, "ARENA", 4 * 48 * 34 * dtype.itemsize)
    matrices = NativeMatrices(dtype)
    weights = [draw(17, 33, dtype=dtype, seed=seed) for seed in range(9)] + [draw(170, 33, dtype=dtype, seed=9)]
    packed = [matrices.pack(weight) for weight in weights]
    for weight, place in zip(weights, packed, strict=True):
        assert place.data_ptr() % 64 == 0
        assert torch.equal(matrices.rows(torch.arange(len(weight)), place), weight)


def test_what_is_chosen_is_told(monkeypatch):
    assert choose_matrices("torch", torch.float32, CPU)[1].startswith(("packed for oneDNN", "plain"))
    assert choose_matrices("flash", torch.bfloat16, torch.device("cuda")) == (None, "plain: the device is cuda")
    with pytest.raises(ConfigError, match="float32 and bfloat16, not float16"):
        NativeMatrices(torch.float16)
    monkeypatch.setattr(native_linear, "_is_faster", lambda dtype: True)
    if shutil.which("cc"):
        chosen, reason = choose_matrices("native", torch.float32, CPU)
        assert isinstance(chosen, NativeMatrices) and reason == "native, as attention is"
    monkeypatch.setenv("CC", "no-such-compiler")
    chosen, reason = choose_matrices("native", torch.float32, CPU)
    assert chosen is None or isinstance(chosen, TorchMatrices)
    assert reason.endswith(": there is no C compiler (no-such-compiler) here")


@compiles
def test_a_matrix_need_not_lie_in_one_piece(matrices, dtype):
    """One that is packed from a copy, and so large that the copy's memory would be given back at once."""
    weight = draw(2048, 4096, dtype=dtype).t()
    x = draw(3, 2048, dtype=dtype)
    product = matrices.product(x, matrices.pack(weight))
    assert torch.allclose(product, F.linear(x, weight), rtol=TOLERANCE[dtype], atol=100 * TOLERANCE[dtype])


@compiles
def test_what_the_kernel_would_read_wrongly_is_no_input(dtype):
    matrices = NativeMatrices(dtype)
    packed = matrices.pack(draw(32, 48, dtype=dtype))
    for wrong in (draw(2, 47, dtype=dtype), draw(2, 48, dtype=torch.float64)):
        with pytest.raises(AssertionError):
            matrices.product(wrong, packed)
    with pytest.raises(AssertionError):
        matrices.rows(torch.tensor([1], dtype=torch.int32), packed)
    strided = torch.arange(8)[::3]
    assert torch.equal(matrices.rows(strided, packed), matrices.rows(strided.contiguous(), packed))
