"""Attention over a paged KV cache: one seam, a backend for every device and one for GPUs with flash-attn."""

from __future__ import annotations

from pdserve.engine.attention.base import AttentionBackend, AttentionMetadata, SequenceChunk
from pdserve.engine.attention.select import select_backend

__all__ = ["AttentionBackend", "AttentionMetadata", "SequenceChunk", "select_backend"]
