"""Kernels for norms, gates and rotations compute what torch computes, rounded once."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F

from pdserve.core.errors import ConfigError
from pdserve.core.layout import KVLayout
from pdserve.engine.attention import HeadShape
from pdserve.engine.config import RopeConfig
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.pointwise import NativePointwise, TorchPointwise
from pdserve.engine.rope import rope_table

SHAPE, WIDTH, GATE, EPS = HeadShape(5, 1, 32), 48, 80, 1e-5
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2}}
native = pytest.param(
    NativePointwise, marks=pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")
)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=[TorchPointwise, native])
def ops(request, dtype):
    return TorchPointwise() if request.param is TorchPointwise else NativePointwise(SHAPE, (WIDTH, GATE), dtype)


def draw(*shape, dtype, seed=0):
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("adds", [True, False])
def test_norm(ops, dtype, rows, adds):
    hidden, weight = draw(rows, WIDTH, dtype=dtype), draw(WIDTH, dtype=dtype, seed=1)
    added = draw(rows, WIDTH, dtype=dtype, seed=2) if adds else None
    total = hidden + added if adds else hidden.clone()
    wide = total.double()
    want = wide / (wide.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight.double()
    got = ops.add_norm(hidden, added, weight, EPS)
    assert torch.equal(hidden, total)
    torch.testing.assert_close(got.double(), want, **TOLERANCE[dtype])


@pytest.mark.parametrize("rows", [1, 40])
def test_gate(ops, dtype, rows):
    gates = draw(rows, 2 * GATE, dtype=dtype)
    gates[0, :6] = torch.tensor([0.0, -0.0, 200.0, -200.0, 90.0, -90.0])
    gate, up = gates.double().chunk(2, dim=-1)
    torch.testing.assert_close(ops.gate(gates.clone()).double(), F.silu(gate) * up, **TOLERANCE[dtype])


def test_what_is_no_number_stays_so(ops, dtype):
    gates = draw(2, 2 * GATE, dtype=dtype)
    gates[1, 3] = float("nan")
    got = ops.gate(gates)
    assert got[1, 3].isnan() and got.isnan().sum() == 1


@pytest.mark.parametrize("positions", [[0], [7, 100, 3], list(range(50, 90))], ids=len)
def test_rotation(ops, dtype, positions):
    """Of the first heads of wider rows, as queries and keys are of the three that one product makes."""
    table = rope_table(RopeConfig(theta=10000.0), SHAPE.size, 128, "cpu")
    rows = draw(len(positions), 7, SHAPE.size, dtype=dtype)
    x, rest = rows[:, :6], rows[:, 6:].clone()
    cos, sin = table[positions].double().unsqueeze(2).unbind(1)
    want = x.double() * cos + x.double().roll(SHAPE.size // 2, -1) * sin
    got = ops.rotate(x, ops.rotation(torch.tensor(positions), table))
    torch.testing.assert_close(got.double(), want, atol=4e-2 if dtype == torch.bfloat16 else 1e-6, rtol=1e-2)
    assert torch.equal(rows[:, 6:], rest)


@pytest.mark.parametrize("slots", [[7], list(range(40, 8, -1))], ids=len)
def test_keys_and_values_go_to_their_slots_and_nowhere_else(ops, dtype, slots):
    """From the last heads of rows, which have others before them."""
    layout = KVLayout(16, 2, SHAPE.kv_heads, SHAPE.size, str(dtype).removeprefix("torch."), bytes(16))
    kv = KVCache(layout, 3, "cpu")
    kv.data.copy_(draw(*kv.data.shape, dtype=dtype))
    rows, others = draw(len(slots), 7, SHAPE.size, dtype=dtype, seed=1), draw(len(slots), 2, SHAPE.size, dtype=dtype)
    keys, values = rows[:, 6:], others[:, 1:]
    want = kv.data.clone()
    for place, slot in enumerate(slots):
        want[1, 0, slot], want[1, 1, slot] = keys[place], values[place]
    ops.store(kv, 1, torch.tensor(slots), keys, values)
    assert torch.equal(kv.data, want)


def test_what_does_not_fit_is_told():
    with pytest.raises(ConfigError, match="widths of a multiple of 16"):
        NativePointwise(SHAPE, (WIDTH, 40), torch.float32)
    with pytest.raises(ConfigError, match="float32 and bfloat16"):
        NativePointwise(SHAPE, (WIDTH, GATE), torch.float16)
