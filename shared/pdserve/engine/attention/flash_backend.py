"""Attention by flash-attn's paged kernels: GPUs, float16 and bfloat16, blocks of a multiple of 256 tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

from pdserve.core.errors import ConfigError
from pdserve.engine.attention.base import AttentionMetadata, SequenceChunk, slots_of
from pdserve.engine.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class FlashMetadata:
    """`block_table` [B, most blocks], `context_lens` [B], `query_starts` and `context_starts` [B + 1], all int32."""

    slots: torch.Tensor
    block_table: torch.Tensor
    context_lens: torch.Tensor
    query_starts: torch.Tensor
    context_starts: torch.Tensor
    max_query_len: int
    max_context_len: int


class Backend:
    """See `AttentionBackend`."""

    name = "flash"

    def check_block_size(self, block_size: int) -> None:
        if block_size < 256 or block_size % 256:
            raise ConfigError(f"flash attention pages by multiples of 256 tokens, not {block_size}")

    def build(self, chunks: Sequence[SequenceChunk], kv: KVCache) -> FlashMetadata:
        used = [-(-chunk.context_len // kv.block_size) for chunk in chunks]
        width = max(used)
        rows = [[*chunk.block_table[:count], *[0] * (width - count)] for chunk, count in zip(chunks, used, strict=True)]
        query_lens = torch.tensor([chunk.query_len for chunk in chunks], dtype=torch.int32)
        context_lens = torch.tensor([chunk.context_len for chunk in chunks], dtype=torch.int32)

        def put(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(kv.device, non_blocking=True)

        return FlashMetadata(
            slots=put(slots_of(chunks, kv.block_size)),
            block_table=put(torch.tensor(rows, dtype=torch.int32)),
            context_lens=put(context_lens),
            query_starts=put(_starts(query_lens)),
            context_starts=put(_starts(context_lens)),
            max_query_len=int(query_lens.max()),
            max_context_len=int(context_lens.max()),
        )

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
        plan = cast(FlashMetadata, meta)
        keys, values = (part.view(kv.num_blocks, kv.block_size, *part.shape[1:]) for part in kv.layer(layer_index))
        # flash-attn counts the tokens to the left; (-1, -1) is no window.
        window_size = (-1, -1) if window is None else (window - 1, 0)
        if plan.max_query_len == 1:
            out = flash_attn_with_kvcache(
                q.unsqueeze(1),
                keys,
                values,
                cache_seqlens=plan.context_lens,
                block_table=plan.block_table,
                causal=True,
                window_size=window_size,
            )
        else:
            out = flash_attn_varlen_func(
                q,
                keys,
                values,
                cu_seqlens_q=plan.query_starts,
                cu_seqlens_k=plan.context_starts,
                max_seqlen_q=plan.max_query_len,
                max_seqlen_k=plan.max_context_len,
                causal=True,
                window_size=window_size,
                block_table=plan.block_table,
            )
        return cast(torch.Tensor, out).reshape(q.shape[0], -1)


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)))
