"""Attention over a paged KV cache: one seam, a backend for every device, one for CPUs and one for GPUs."""

from __future__ import annotations

from pdserve.engine.attention.base import AttentionBackend, AttentionMetadata, HeadShape, SequenceChunk
from pdserve.engine.attention.select import select_backend

__all__ = ["AttentionBackend", "AttentionMetadata", "HeadShape", "SequenceChunk", "select_backend"]
