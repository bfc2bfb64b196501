"""Runs a pdserve model over sequences step by step, and transformers over the same tokens, for comparison."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from pdserve.engine.attention import HeadShape, SequenceChunk, select_backend
from pdserve.engine.config import ModelConfig
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.model import CausalLM
from pdserve.engine.weights import load_weights


class Harness:
    """A loaded float32 model with a small cache whose blocks are dealt out in a shuffled order (or in sequence)."""

    def __init__(self, folder: Path, block_size: int = 16, num_tokens: int = 1024, scattered: bool = True) -> None:
        self.config = ModelConfig.load(folder)
        shape = HeadShape(self.config.num_heads, self.config.num_kv_heads, self.config.head_size)
        self.backend, _ = select_backend("torch", "cpu", torch.float32, block_size, shape)
        self.model = CausalLM(self.config, self.backend, torch.float32, "cpu")
        load_weights(self.model, folder)
        self.kv = KVCache(self.model.layout(block_size, bytes(16)), num_tokens // block_size, "cpu")
        self._blocks = list(range(self.kv.num_blocks))
        if scattered:
            random.Random(0).shuffle(self._blocks)
        self.tokens: list[list[int]] = []
        self.computed: list[int] = []
        self._tables: list[list[int]] = []

    def add(self, tokens: list[int], room: int = 32) -> int:
        """A new sequence with pages for its tokens and `room` more; returns its index."""
        count = -(-(len(tokens) + room) // self.kv.block_size)
        self._tables.append([self._blocks.pop(0) for _ in range(count)])
        self.tokens.append(list(tokens))
        self.computed.append(0)
        return len(self.tokens) - 1

    def step(self, counts: dict[int, int]) -> torch.Tensor:
        """Compute the next `counts[i]` tokens of each sequence i in one batch: log-probabilities [T, vocabulary]."""
        chunks, ids, positions = [], [], []
        for index, count in counts.items():
            start, end = self.computed[index], self.computed[index] + count
            chunks.append(SequenceChunk(count, end, self._tables[index]))
            ids.extend(self.tokens[index][start:end])
            positions.extend(range(start, end))
            self.computed[index] = end
        meta = self.backend.build(chunks, self.kv)
        hidden = self.model.forward(torch.tensor(ids), torch.tensor(positions), self.kv, meta)
        return self.model.logits(hidden).log_softmax(-1)

    def greedy(self, index: int, count: int) -> torch.Tensor:
        """Decode `count` tokens, the first from a sequence that is one token short of computed: [count, vocabulary]."""
        rows = []
        for _ in range(count):
            rows.append(self.step({index: 1})[-1])
            self.tokens[index].append(int(rows[-1].argmax()))
        return torch.stack(rows)


def reference_logprobs(folder: Path, tokens: list[int]) -> torch.Tensor:
    """transformers' float32 log-probabilities [T, vocabulary] of one sequence, computed in one go."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


def random_tokens(count: int, seed: int = 0, vocab_size: int = 256) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=count)
