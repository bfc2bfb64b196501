"""The seam between the model and how attention is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from pdserve.engine.kv_cache import KVCache


class SequenceChunk(NamedTuple):
    """One sequence's part of a step: its last `query_len` tokens of `context_len`, in the pages of `block_table`.

    The table may be longer than the context; what it holds beyond is not read.
    """

    query_len: int
    context_len: int
    block_table: Sequence[int]


class HeadShape(NamedTuple):
    """Query heads and KV heads of a layer, and the elements of each."""

    heads: int
    kv_heads: int
    size: int


class AttentionMetadata(Protocol):
    """What all layers of one step share. `slots`: int64 [T], where each token's KV goes. Belongs to its backend."""

    slots: torch.Tensor


class AttentionBackend(Protocol):
    """Computes attention of a flat batch: sequences one after another, each with any number of tokens."""

    name: str

    def check_block_size(self, block_size: int) -> None:
        """Raise ConfigError for a block size that this backend cannot page by."""

    def build(self, chunks: Sequence[SequenceChunk], kv: KVCache) -> AttentionMetadata:
        """Prepare one step over `chunks`, in the order of the flat batch. No chunk may be empty."""

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
        """Causal attention of q [T, heads, size] over each sequence's context: [T, heads * size].

        The layer's k and v [T, KV heads, size] of this step are in the cache already (`KVCache.append` at meta.slots);
        they are given so that a first chunk need not read them back. `window` counts the tokens that a token sees,
        itself included; None: all before it.
        """


def slots_of(chunks: Sequence[SequenceChunk], block_size: int) -> torch.Tensor:
    """int64 [T] on the CPU: the cache slot of each token of the step."""
    slots: list[int] = []
    for query_len, context_len, table in chunks:
        position = context_len - query_len
        while position < context_len:  # block by block: a decode takes one turn
            block, offset = divmod(position, block_size)
            count = min(block_size - offset, context_len - position)
            start = table[block] * block_size + offset
            slots.extend(range(start, start + count))
            position += count
    return torch.tensor(slots, dtype=torch.int64)
