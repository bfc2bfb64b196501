"""Attention by PyTorch's scaled_dot_product_attention, on any device and with any block size up to 512.

What reads the cache is chosen per sequence, once a step (benchmarks/attention.py; figures in its docstring):

- a prefill's first chunk attends to its own k and v and reads nothing;
- a sequence whose blocks lie side by side in memory is read in place, as a view, when it is long or nearly alone:
  a call a sequence costs 20 to 40 us, which many short sequences would pay more for than for a copy;
- all other decodes are copied (whole blocks, into one buffer that all layers reuse) and padded to the longest of
  their bucket, so that many short ones are one call. Buckets keep the padding below a quarter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F

from pdserve.core.errors import ConfigError
from pdserve.engine.attention.base import AttentionMetadata, SequenceChunk, slots_of
from pdserve.engine.attention.plan import Bucket, Plan, Prefill, Source, make_plan
from pdserve.engine.kv_cache import KVCache


class TorchMetadata:
    """The step's slots, and its plan for each window size that some layer has; plans are made on first use."""

    def __init__(self, chunks: Sequence[SequenceChunk], kv: KVCache) -> None:
        self.slots = slots_of(chunks, kv.block_size).to(kv.device, non_blocking=True)
        self._chunks = chunks
        self._plans: dict[int | None, Plan] = {}

    def plan(self, kv: KVCache, window: int | None) -> Plan:
        if window not in self._plans:
            self._plans[window] = make_plan(self._chunks, kv, window)
        return self._plans[window]


class Backend:
    """See `AttentionBackend`."""

    name = "torch"

    def check_block_size(self, block_size: int) -> None:
        if not 1 <= block_size <= 512:
            raise ConfigError(f"torch attention pages by 1 to 512 tokens, not {block_size}")

    def build(self, chunks: Sequence[SequenceChunk], kv: KVCache) -> TorchMetadata:
        return TorchMetadata(chunks, kv)

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
        plan = cast(TorchMetadata, meta).plan(kv, window)
        pages = kv.data[layer_index]
        if plan.whole is not None:  # the common step: decodes of like length, nothing to put in order
            return _decode_bucket(q, pages, plan.whole)
        out = torch.empty_like(q)
        for prefill in plan.prefills:
            out[prefill.start : prefill.end] = attend_prefill(q, k, v, pages, prefill)
        for row, source in plan.singles:
            out[row] = _decode_one(q[row], *_fetch(pages, source))
        for bucket in plan.buckets:
            heads = _decode_bucket(q.index_select(0, bucket.rows), pages, bucket)
            out.index_copy_(0, bucket.rows, heads.view(-1, *q.shape[1:]))
        return out.flatten(1)


def attend_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, prefill: Prefill
) -> torch.Tensor:
    """One chunk's rows of the batch's q, k and v over its context in a layer's pages: [rows, heads, size]."""
    rows = slice(prefill.start, prefill.end)
    context = (k[rows], v[rows]) if prefill.source is None else _fetch(pages, prefill.source)
    return _attend(q[rows], *context, prefill.mask, prefill.causal)


def _fetch(pages: torch.Tensor, source: Source) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [length, KV heads, size] of one sequence from a layer's pages [2, slots, KV heads, size]."""
    if source.slots is None:
        keys, values = pages.narrow(1, source.start, source.length).unbind(0)
    else:
        keys, values = pages.index_select(1, source.slots).unbind(0)
    return keys, values


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    """One sequence: q [T, heads, size] over k, v [L, KV heads, size], with mask [T, L] or causal: [T, heads, size]."""
    query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def _decode_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One token: q [heads, size] over k, v [L, KV heads, size]: [heads, size].

    The heads that share a KV head stand as its queries: all see the same keys, so that nothing is repeated or masked.
    """
    query = q.view(1, k.shape[1], -1, q.shape[1])
    out = F.scaled_dot_product_attention(query, k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0))
    return out.view(q.shape)


def _decode_bucket(q: torch.Tensor, pages: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """One token of each of B sequences: q [B, heads, size]: [B, heads * size]."""
    batch, _, size = q.shape
    kv_heads = pages.shape[2]
    torch.index_select(pages.view(-1, bucket.copy.shape[1]), 0, bucket.block_ids, out=bucket.copy)
    if bucket.stale is not None:
        bucket.copy.view(-1, kv_heads * size).index_fill_(0, bucket.stale, 0.0)
    keys, values = bucket.copy.view(2, batch, -1, kv_heads, size)[:, :, : bucket.length].transpose(2, 3).unbind(0)
    query = q.reshape(batch, kv_heads, -1, size)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=bucket.mask).reshape(batch, -1)
