"""Every backend computes plain causal attention over pages, and says when it cannot."""

from __future__ import annotations

import importlib
import math
import random
import shutil
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from pdserve.core.errors import ConfigError
from pdserve.core.layout import KVLayout
from pdserve.engine.attention import HeadShape, SequenceChunk, select_backend
from pdserve.engine.attention.base import slots_of
from pdserve.engine.attention.plan import make_plan
from pdserve.engine.kv_cache import KVCache

HEADS, KV_HEADS, SIZE = 6, 2, 16
SHAPE = HeadShape(HEADS, KV_HEADS, SIZE)
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler on this machine")
DECODES = [(1, length) for length in (1, 2, 16, 17, 40, 33, 64, 5)]
MIXED = [(7, 7), (1, 30), (5, 25), (40, 40), (1, 1), (1, 700), (32, 600), (1, 31)]


def naive(q, k, v, window):
    """One sequence: the last len(q) tokens over k and v [L, KV heads, size], by the formula."""
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(SIZE)
    queries = torch.arange(len(k) - len(q), len(k))[:, None]
    keys = torch.arange(len(k))
    hidden = (keys > queries) | (keys <= queries - (window or len(k)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v).flatten(1)


def cache(block_size, tokens=4096, dtype="float32"):
    """A cache full of large numbers, so that reading what is not a sequence's own shows."""
    kv = KVCache(KVLayout(block_size, 2, KV_HEADS, SIZE, dtype, bytes(16)), -(-tokens // block_size), "cpu")
    kv.data.fill_(50.0)
    return kv


def check(backend, lengths, block_size, window, scattered, tokens=4096):
    kv = cache(block_size, tokens)
    generator = torch.Generator().manual_seed(1)
    blocks = list(range(kv.num_blocks))
    if scattered:
        random.Random(2).shuffle(blocks)
    chunks, queries, keys, values, expected = [], [], [], [], []
    for query_len, context_len in lengths:
        table = [blocks.pop(0) for _ in range(-(-context_len // block_size))] + [kv.num_blocks - 1]
        chunks.append(SequenceChunk(query_len, context_len, table))
        q = torch.randn(query_len, HEADS, SIZE, generator=generator)
        k, v = torch.randn(2, context_len, KV_HEADS, SIZE, generator=generator)
        kv.append(1, slots_of([SequenceChunk(context_len, context_len, table)], block_size), k, v)
        queries.append(q)
        keys.append(k[-query_len:])
        values.append(v[-query_len:])
        expected.append(naive(q, k, v, window))
    meta = backend.build(chunks, kv)
    got = backend.forward(1, torch.cat(queries), torch.cat(keys), torch.cat(values), kv, meta, window)
    torch.testing.assert_close(got, torch.cat(expected), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["torch", pytest.param("native", marks=needs_cc)])
@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("window", [None, 1, 12, 100])
@pytest.mark.parametrize("block_size", [1, 3, 16, 512])
@pytest.mark.parametrize("lengths", [DECODES, MIXED, [(1, 600)], [(9, 9)]], ids=["decodes", "mixed", "one", "prompt"])
def test_backends_equal_the_formula(name, lengths, block_size, window, scattered):
    backend, _ = select_backend(name, "cpu", torch.float32, block_size, SHAPE)
    check(backend, lengths, block_size, window, scattered, tokens=9 * 1024)


LENGTHS = (1, 16, 97, 200)


def decodes(dtype, shape, lengths):
    """One token of each of some sequences in bfloat16's numbers; the backend, and what it takes."""
    heads, kv_heads, size = shape
    generator = torch.Generator().manual_seed(3)
    blocks = list(range(sum(-(-length // 16) for length in lengths)))
    random.Random(6).shuffle(blocks)
    kv = KVCache(KVLayout(16, 1, kv_heads, size, str(dtype).removeprefix("torch."), bytes(16)), len(blocks), "cpu")
    kv.data.copy_(torch.randn(kv.data.shape, generator=generator).bfloat16())
    chunks = [SequenceChunk(1, length, [blocks.pop() for _ in range(-(-length // 16))]) for length in lengths]
    # Rows of a larger tensor, as the model's queries are.
    q = (2 * torch.randn(len(lengths), heads + 2, size, generator=generator)).bfloat16()[:, :heads].to(dtype)
    backend, _ = select_backend("native", "cpu", dtype, 16, HeadShape(*shape))
    return backend, kv, chunks, q


def attend(backend, kv, chunks, q, window=None):
    unused = torch.empty(len(chunks), *kv.data.shape[-2:], dtype=kv.dtype)
    return backend.forward(0, q, unused, unused, kv, backend.build(chunks, kv), window)


@needs_cc
@pytest.mark.parametrize("shape", [(4, 4, 16), (6, 2, 48), (9, 3, 64)], ids=str)
def test_native_computes_in_float32_whatever_it_reads(shape, machine):
    """In bfloat16 it is the float32 result of the same numbers, rounded: half a unit in the last place of 8 bits. Where
    pairs of bfloat16 are multiplied, the softmax's weights are rounded too, by as much."""
    wide, narrow = (attend(*decodes(dtype, shape, LENGTHS)) for dtype in (torch.float32, torch.bfloat16))
    if machine:
        assert torch.equal(narrow, wide.bfloat16())
    torch.testing.assert_close(narrow.float(), wide, atol=1e-2, rtol=1e-2)


@needs_cc
@pytest.mark.parametrize("shape", [(32, 4, 128), (8, 1, 256)], ids=str)
def test_native_computes_wide_heads(shape):
    wide, narrow = (attend(*decodes(dtype, shape, LENGTHS)) for dtype in (torch.float32, torch.bfloat16))
    torch.testing.assert_close(narrow.float(), wide, atol=1e-2, rtol=1e-2)


@needs_cc
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_decode_depends_on_nothing_but_its_own_sequence(dtype, threads):
    """Alone its heads are shared out, among many it is one thread's; what is read ahead is not what is computed."""
    lengths = [1, 2, 15, 64, 65, 129, 300, 31, 128]
    backend, kv, chunks, q = decodes(dtype, (9, 3, 64), lengths)
    for window in (None, 70):
        alone = [attend(backend, kv, [chunk], q[i : i + 1], window) for i, chunk in enumerate(chunks)]
        for count in (2, 3, 5, 9):
            assert torch.equal(attend(backend, kv, chunks[:count], q[:count], window), torch.cat(alone[:count]))


@needs_cc
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("shape", [(4, 4, 16), (6, 2, 48), (9, 3, 64), (14, 2, 128), (64, 2, 32)], ids=str)
def test_native_prefills_in_bfloat16(shape, window, monkeypatch):
    """Scores and sums in float32, weights rounded to bfloat16: as near to the formula as the torch backend is."""
    monkeypatch.setattr("pdserve.engine.attention.native_backend.prefills_natively", lambda dtype: True)
    heads, kv_heads, size = shape
    generator = torch.Generator().manual_seed(4)
    lengths = [(300, 300), (2, 90), (65, 200), (1, 50)]
    chunks, blocks = [], list(range(60))
    random.Random(5).shuffle(blocks)
    for query_len, context_len in lengths:
        chunks.append(SequenceChunk(query_len, context_len, [blocks.pop() for _ in range(-(-context_len // 16))]))
    kv = KVCache(KVLayout(16, 1, kv_heads, size, "bfloat16", bytes(16)), 60, "cpu")
    kv.data.copy_(torch.randn(kv.data.shape, generator=generator))
    q = torch.randn(sum(query_len for query_len, _ in lengths), heads, size, generator=generator).bfloat16()
    firsts = [
        slots_of([SequenceChunk(c.context_len, c.context_len, c.block_table)], 16)[-c.query_len :] for c in chunks
    ]
    k, v = kv.data[0][:, torch.cat(firsts)].unbind(0)
    results = []
    for name in ("native", "torch"):
        backend, _ = select_backend(name, "cpu", torch.bfloat16, 16, HeadShape(*shape))
        results.append(backend.forward(0, q, k, v, kv, backend.build(chunks, kv), window).float())
    torch.testing.assert_close(*results, atol=2e-2, rtol=2e-2)


@needs_cc
def test_native_leaves_prefills_to_torch_where_that_is_faster(monkeypatch):
    monkeypatch.setattr("pdserve.engine.attention.native_backend.prefills_natively", lambda dtype: False)
    backend, _ = select_backend("native", "cpu", torch.float32, 16, SHAPE)
    check(backend, MIXED, 16, None, scattered=True)


@needs_cc
def test_native_says_what_does_not_fit():
    with pytest.raises(ConfigError, match="multiple of 16 elements up to 256, not 24"):
        select_backend("native", "cpu", torch.float32, 16, HeadShape(4, 2, 24))
    with pytest.raises(ConfigError, match="float32 and bfloat16, not float16"):
        select_backend("native", "cpu", torch.float16, 16, SHAPE)
    with pytest.raises(ConfigError, match="the device is cuda"):
        select_backend("native", "cuda", torch.float32, 16, SHAPE)
    backend, reason = select_backend("auto", "cpu", torch.float16, 16, SHAPE)
    assert backend.name == "torch" and reason.startswith("auto: no native since native attention takes float32")


def test_many_short_decodes_are_one_call():
    """256 decodes of like length are one bucket in the batch's order, whatever their blocks."""
    kv = cache(16, tokens=256 * 64)
    chunks = [SequenceChunk(1, 50 + row % 10, list(range(4 * row, 4 * row + 4))) for row in range(256)]
    assert make_plan(chunks, kv, None).whole is not None


def test_padding_stays_bounded():
    """One long context among short ones does not pad them all to its length."""
    kv = cache(16, tokens=16384)
    blocks = list(range(0, 2048, 2))
    chunks = [SequenceChunk(1, 30, blocks[:2])] * 200 + [SequenceChunk(1, 8000, blocks[:500])]
    plan = make_plan(chunks, kv, None)
    assert [len(bucket.rows) for bucket in plan.buckets] == [1, 200]


def test_slots_follow_the_block_table():
    chunks = [SequenceChunk(5, 6, [7, 2]), SequenceChunk(1, 4, [9]), SequenceChunk(1, 5, [9, 0])]
    assert slots_of(chunks, 4).tolist() == [29, 30, 31, 8, 9, 39, 0]


def test_the_reason_for_a_backend_is_told(monkeypatch):
    monkeypatch.setattr("pdserve.engine.attention.select.find_spec", lambda name: None)
    monkeypatch.setenv("CC", "no-such-compiler")
    backend, reason = select_backend("auto", "cpu", torch.bfloat16, 256, SHAPE)
    assert (backend.name, reason) == ("torch", "auto: no native since there is no C compiler (no-such-compiler) here")
    assert "float32" in select_backend("auto", "cuda", torch.float32, 256, SHAPE)[1]
    assert "multiple of 256, not 16" in select_backend("auto", "cuda", torch.bfloat16, 16, SHAPE)[1]
    assert "not installed" in select_backend("auto", "cuda", torch.bfloat16, 256, SHAPE)[1]
    with pytest.raises(ConfigError, match="'flash' cannot be used: the device is cpu"):
        select_backend("flash", "cpu", torch.bfloat16, 256, SHAPE)
    with pytest.raises(ConfigError, match="'magic' is unknown"):
        select_backend("magic", "cpu", torch.float32, 16, SHAPE)
    with pytest.raises(ConfigError, match="1 to 512 tokens, not 1024"):
        select_backend("torch", "cpu", torch.float32, 1024, SHAPE)


def _paged(cache, table, length):
    return cache[table.long()].flatten(0, 1)[:length]


def _attend(q, k, v, causal, window_size):
    assert causal and q.dim() == 3
    return naive(q, k, v, None if window_size == (-1, -1) else window_size[0] + 1).view_as(q)


def _with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, causal, window_size):
    assert cache_seqlens.dtype == block_table.dtype == torch.int32
    rows = zip(q, block_table, cache_seqlens.tolist(), strict=True)
    return torch.stack(
        [_attend(x, _paged(k_cache, t, n), _paged(v_cache, t, n), causal, window_size) for x, t, n in rows]
    )


def _varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size, block_table):
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == block_table.dtype == torch.int32
    queries, contexts = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (max_seqlen_q, max_seqlen_k) == (max(queries), max(contexts))
    rows = zip(q.split(queries), block_table, contexts, strict=True)
    return torch.cat([_attend(x, _paged(k, t, n), _paged(v, t, n), causal, window_size) for x, t, n in rows])


@pytest.fixture
def flash(monkeypatch):
    """The flash backend over stand-ins that follow flash-attn's documentation, since its kernels need a GPU."""
    module = ModuleType("flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", None)
    module.flash_attn_with_kvcache, module.flash_attn_varlen_func = _with_kvcache, _varlen
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    name = "pdserve.engine.attention.flash_backend"
    yield importlib.import_module(name).Backend()
    del sys.modules[name]


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("lengths", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_flash_is_called_as_its_documentation_says(flash, lengths, window):
    check(flash, lengths, 256, window, scattered=True, tokens=9 * 1024)


def test_flash_is_chosen_where_it_works(flash):
    backend, reason = select_backend("auto", "cuda", torch.bfloat16, 512, SHAPE)
    assert (backend.name, reason) == ("flash", "auto: flash-attn serves this device")
    assert select_backend("flash", "cuda", torch.float16, 256, SHAPE)[1] == "asked for by name"
    with pytest.raises(ConfigError, match="256 tokens, not 128"):
        flash.check_block_size(128)


@pytest.mark.parametrize("name", ["torch", pytest.param("native", marks=needs_cc)])
def test_what_an_earlier_owner_left_behind_does_not_matter(name):
    """NaN behind the end of a sequence, in its own last block, is masked and must not come through the mask."""
    backend, _ = select_backend(name, "cpu", torch.float32, 16, SHAPE)
    kv = cache(16)
    kv.data.normal_()
    lengths, tables = (5, 20, 33), ([3], [7, 1], [4, 9, 12])
    q, k, v = torch.randn(3, HEADS, SIZE), torch.randn(3, KV_HEADS, SIZE), torch.randn(3, KV_HEADS, SIZE)
    chunks = [SequenceChunk(1, length, table) for length, table in zip(lengths, tables, strict=True)]
    meta = backend.build(chunks, kv)
    kv.append(0, meta.slots, k, v)
    clean = backend.forward(0, q, k, v, kv, meta, None).clone()
    for length, table in zip(lengths, tables, strict=True):
        kv.data[:, :, table[-1] * 16 + length % 16 : (table[-1] + 1) * 16] = float("nan")
    assert torch.equal(backend.forward(0, q, k, v, kv, backend.build(chunks, kv), None), clean)


@needs_cc
def test_native_lets_what_is_no_number_show():
    """NaN or infinity in a sequence's own keys comes out as NaN, as the formula has it, and stays in that sequence."""
    backend, _ = select_backend("native", "cpu", torch.float32, 16, SHAPE)
    kv = cache(16)
    kv.data.normal_()
    q, unused = torch.randn(3, HEADS, SIZE), torch.randn(3, KV_HEADS, SIZE)
    chunks = [SequenceChunk(1, 20, [3, 5]), SequenceChunk(1, 40, [7, 1, 2]), SequenceChunk(1, 5, [9])]
    clean = backend.forward(0, q, unused, unused, kv, backend.build(chunks, kv), None)
    kv.data[0, 0, 1 * 16 + 3, :, 0] = float("nan")
    got = backend.forward(0, q, unused, unused, kv, backend.build(chunks, kv), None)
    assert got[1].isnan().all() and torch.equal(got[::2], clean[::2])
