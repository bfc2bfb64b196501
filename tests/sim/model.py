"""A model that is a hash: the next token is a function of all tokens before it, and so is each token's KV.

So whatever goes on from the wrong tokens shows in the next one, and whoever reads a page that is stale, incomplete or
somebody else's finds numbers that are not its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pdserve.core.errors import IntegrityError
from pdserve.core.layout import KVLayout
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.sampler import SampledToken
from pdserve.engine.scheduler import Scheduled
from tests.tiny_models import EOS_ID

LAYOUT = KVLayout(4, 2, 1, 1, "float32", bytes(16))
MASK = (1 << 64) - 1
LETTERS = 26  # tokens are lower-case letters, and now and then the one that ends an answer
ONE_IN = 40


def chain(tokens: Sequence[int]) -> list[int]:
    """For each token a hash of it and of all before it."""
    state, states = 0x9E3779B97F4A7C15, []
    for token in tokens:
        state = ((state ^ token) * 0xD1342543DE82EF95 + 0x632BE59BD9B4E019) & MASK
        state ^= state >> 29
        states.append(state)
    return states


def next_token(state: int) -> int:
    """What follows on the tokens with this hash."""
    return EOS_ID if (state >> 40) % ONE_IN == 0 else ord("a") + (state >> 20) % LETTERS


def answer(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The whole right answer, with the token that ends it."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens and tokens[len(prompt) :][-1:] != [EOS_ID]:
        tokens.append(next_token(chain(tokens)[-1]))
    return tokens[len(prompt) :]


class HashRunner:
    """Stands for engine.runner.Runner. `took` is told how many tokens each step computed."""

    def __init__(self, kv: KVCache, took: Callable[[int], None]) -> None:
        self.kv = kv
        self._pages: Any = kv.data.numpy()[..., 0, 0]  # layers, K and V, slots
        self._took = took

    def run(
        self, batch: Sequence[Scheduled], on_layer: Callable[[int], None] | None, on_forward: Any = None
    ) -> list[SampledToken]:
        """Raises IntegrityError where a page does not hold what its sequence needs of it."""
        layers = range(LAYOUT.num_layers)
        work = []
        for item in batch:
            sequence, start = item.sequence, item.sequence.num_computed
            end = start + item.count
            states = np.array(chain(sequence.tokens[:end]), dtype=np.uint64)
            slots = self.slots(sequence.block_table, end)
            work.append((sequence, start, states, slots))
        for layer in layers:
            for sequence, start, states, slots in work:
                values = numbers(states, layer)
                if not (self._pages[layer][:, slots[:start]] == values[:start]).all():
                    raise IntegrityError(f"{sequence.id} reads pages in layer {layer} that are not its own KV")
                self._pages[layer][:, slots[start:]] = values[start:]
            if on_layer is not None:
                on_layer(layer)
        self._took(sum(item.count for item in batch))
        return [
            SampledToken(next_token(int(states[-1])))
            for item, (_, _, states, _) in zip(batch, work, strict=True)
            if item.samples
        ]

    def copy_block(self, source: int, target: int) -> None:
        size = LAYOUT.block_size
        pages = self._pages
        pages[:, :, target * size : (target + 1) * size] = pages[:, :, source * size : (source + 1) * size]

    @staticmethod
    def slots(table: Sequence[int], count: int) -> Any:
        size = LAYOUT.block_size
        return (np.array(table)[:, None] * size + np.arange(size)).reshape(-1)[:count]


def numbers(states: Any, layer: int) -> Any:
    """KV of tokens with these hashes in a layer: whole float32 numbers, never the 0 of a page that nobody wrote."""
    return ((states >> np.uint64(8 + 16 * layer)) % np.uint64(1 << 23) + np.uint64(1)).astype(np.float32)
