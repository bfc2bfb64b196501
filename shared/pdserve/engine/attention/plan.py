"""How the torch backend reads the cache in one step: decided once, used by all layers with the same window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pdserve.engine.attention.base import SequenceChunk
from pdserve.engine.kv_cache import KVCache

VIEW_TOKENS = 512  # from here on reading in place beats the copy, whatever else is in the batch
VIEW_BATCH = 2  # so few decodes that a call each costs less than a copy
BUCKET_TOKENS = 65536  # what one copy may hold: bounds memory
PADDING_TOKENS = 1024  # this much padding is cheaper than one more call


@dataclass(frozen=True, slots=True)
class Source:
    """Where a sequence's keys are: `length` slots from `start` on, or, if they are scattered, int64 `slots`."""

    start: int
    length: int
    slots: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Prefill:
    """Rows start to end of the batch. `source` None: the chunk is its own context. `mask`: additive [T, L]."""

    start: int
    end: int
    source: Source | None
    mask: torch.Tensor | None
    causal: bool


@dataclass(frozen=True, slots=True)
class Bucket:
    """Decodes that are copied and computed together.

    `rows`: int64 [B], their places in the batch. `block_ids`: int64 [2 * B * blocks], for K then V, into the layer's
    pages seen as [2 * num_blocks, block bytes]. `copy` is where they go. `length`: tokens of the longest; `mask`:
    additive [B, 1, 1, length], or None when all see all of it. `stale`: int64, the copied slots, K and V, behind the
    end of a sequence in its last block: what an earlier owner left there must not be NaN, for a mask does not stop it.
    """

    rows: torch.Tensor
    block_ids: torch.Tensor
    copy: torch.Tensor
    length: int
    mask: torch.Tensor | None
    stale: torch.Tensor | None


@dataclass(slots=True)
class Plan:
    """`whole` is set when one bucket, in the batch's order, is all there is."""

    prefills: list[Prefill] = field(default_factory=list)
    singles: list[tuple[int, Source]] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)
    whole: Bucket | None = None


@dataclass(frozen=True, slots=True)
class _Decode:
    """A decode's row, the blocks that its window touches, and the part of them that it sees: tokens first to last."""

    row: int
    blocks: Sequence[int]
    first: int
    last: int


def make_plan(chunks: Sequence[SequenceChunk], kv: KVCache, window: int | None) -> Plan:
    plan = Plan()
    decodes: list[_Decode] = []
    few = sum(chunk.query_len == 1 for chunk in chunks) <= VIEW_BATCH
    row = 0
    for chunk in chunks:
        if chunk.query_len > 1:
            plan.prefills.append(plan_prefill(row, chunk, kv, window))
        else:
            blocks, first, last = touched(chunk, kv.block_size, window)
            if (few or last - first >= VIEW_TOKENS) and _side_by_side(blocks):
                plan.singles.append((row, Source(blocks[0] * kv.block_size + first, last - first)))
            else:
                decodes.append(_Decode(row, blocks, first, last))
        row += chunk.query_len
    plan.buckets = [_bucket(group, kv) for group in _groups(decodes, kv.block_size)]
    if len(plan.buckets) == 1 and not plan.prefills and not plan.singles:
        plan.whole = plan.buckets[0]
    return plan


def touched(chunk: SequenceChunk, block_size: int, window: int | None) -> tuple[Sequence[int], int, int]:
    """The blocks that hold what any of the chunk's tokens sees, and where in them that begins and ends."""
    seen = _first_seen(chunk, window)
    skipped = seen // block_size
    blocks = chunk.block_table[skipped : -(-chunk.context_len // block_size)]
    return blocks, seen - skipped * block_size, chunk.context_len - skipped * block_size


def _first_seen(chunk: SequenceChunk, window: int | None) -> int:
    return 0 if window is None else max(0, chunk.context_len - chunk.query_len - window + 1)


def _side_by_side(blocks: Sequence[int]) -> bool:
    return blocks[-1] - blocks[0] == len(blocks) - 1 and list(blocks) == list(range(blocks[0], blocks[-1] + 1))


def plan_prefill(row: int, chunk: SequenceChunk, kv: KVCache, window: int | None) -> Prefill:
    """How a chunk of more than one token, whose first is the batch's `row`, is computed."""
    query_len, context_len, _ = chunk
    end = row + query_len
    if query_len == context_len and (window is None or query_len <= window):
        return Prefill(row, end, None, None, causal=True)
    source = None if query_len == context_len else _source(chunk, kv, window)
    queries = torch.arange(context_len - query_len, context_len, device=kv.device)[:, None]
    keys = torch.arange(_first_seen(chunk, window) if source else 0, context_len, device=kv.device)
    allowed = keys <= queries
    if window is not None:
        allowed &= keys > queries - window
    return Prefill(row, end, source, _additive(allowed, kv.dtype), causal=False)


def _source(chunk: SequenceChunk, kv: KVCache, window: int | None) -> Source:
    blocks, first, last = touched(chunk, kv.block_size, window)
    start = blocks[0] * kv.block_size + first
    if _side_by_side(blocks):
        return Source(start, last - first)
    offsets = torch.arange(kv.block_size)
    slots = (torch.tensor(blocks)[:, None] * kv.block_size + offsets).flatten()[first:last]
    return Source(start, last - first, slots.to(kv.device, non_blocking=True))


def _groups(decodes: list[_Decode], block_size: int) -> list[list[_Decode]]:
    """Split into groups of like length. One group keeps the batch's order, which saves putting rows in order."""
    groups: list[list[_Decode]] = []
    padded = used = width = 0
    for decode in sorted(decodes, key=lambda decode: -len(decode.blocks)):
        tokens = len(decode.blocks) * block_size
        padding = padded + width - used - tokens
        if not groups or padding > max(PADDING_TOKENS, padded // 4) or padded + width > BUCKET_TOKENS:
            groups.append([])
            padded, used, width = 0, 0, tokens
        groups[-1].append(decode)
        padded, used = padded + width, used + tokens
    return [decodes] if len(groups) == 1 else groups


def _bucket(group: list[_Decode], kv: KVCache) -> Bucket:
    width = max(len(decode.blocks) for decode in group)
    ids: list[int] = []
    for decode in group:
        ids.extend(decode.blocks)
        ids.extend([decode.blocks[0]] * (width - len(decode.blocks)))  # masked, but it must be a block of its own
    bounds = torch.tensor([(decode.row, decode.first, decode.last) for decode in group])
    length = max(decode.last for decode in group)
    mask = None
    if any(decode.first > 0 or decode.last < length for decode in group):
        places = torch.arange(length)
        allowed = (places >= bounds[:, 1:2]) & (places < bounds[:, 2:3])
        mask = _additive(allowed, kv.dtype)[:, None, None].to(kv.device, non_blocking=True)
    key_ids = torch.tensor(ids)
    _, _, _, kv_heads, size = kv.data.shape
    block_ids = torch.cat((key_ids, key_ids + kv.num_blocks)).to(kv.device, non_blocking=True)
    copy = torch.empty((2 * len(ids), kv.block_size * kv_heads * size), dtype=kv.dtype, device=kv.device)
    rows = bounds[:, 0].contiguous().to(kv.device, non_blocking=True)
    return Bucket(rows, block_ids, copy, length, mask, _stale(group, width, kv))


def _stale(group: list[_Decode], width: int, kv: KVCache) -> torch.Tensor | None:
    """See Bucket. Padding repeats a sequence's first block, which only where it is also the last has such slots."""
    size = kv.block_size
    slots = [
        (half * len(group) + place) * width * size + token
        for half in (0, 1)
        for place, decode in enumerate(group)
        for token in range(decode.last, (width if len(decode.blocks) == 1 else len(decode.blocks)) * size)
    ]
    return torch.tensor(slots).to(kv.device, non_blocking=True) if slots else None


def _additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))
