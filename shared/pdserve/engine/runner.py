"""Runs one batch: flat tensors in, sampled tokens out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from pdserve.engine.attention.base import AttentionBackend, SequenceChunk
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.model import CausalLM
from pdserve.engine.sampler import SampledToken, SampleRequest, sample
from pdserve.engine.scheduler import Scheduled


@dataclass(frozen=True, slots=True)
class Runner:
    """The model, its pages and its attention backend, on one device."""

    model: CausalLM
    kv: KVCache
    attention: AttentionBackend
    device: torch.device

    @torch.inference_mode()
    def run(
        self,
        batch: Sequence[Scheduled],
        on_layer: Callable[[int], None] | None,
        on_forward: Callable[[], None] | None = None,
    ) -> list[SampledToken]:
        """Compute a batch and sample the next token of each sequence that reaches its last one, in batch order.

        `on_layer(i)` is called in the layer loop, once the batch's KV of layer i is written (on CUDA: queued), and
        `on_forward` after the last layer. The one synchronisation with the device is reading the sampled tokens at the
        end.
        """
        spans = [(s.sequence, s.sequence.num_computed, s.sequence.num_computed + s.count) for s in batch]
        tokens = [token for sequence, start, end in spans for token in sequence.tokens[start:end]]
        positions = [position for _, start, end in spans for position in range(start, end)]
        chunks = [SequenceChunk(end - start, end, sequence.block_table) for sequence, start, end in spans]
        hidden = self.model.forward(
            self._tensor(tokens), self._tensor(positions), self.kv, self.attention.build(chunks, self.kv), on_layer
        )
        if on_forward is not None:
            on_forward()
        ends = list(accumulate(scheduled.count for scheduled in batch))
        rows = [end - 1 for end, scheduled in zip(ends, batch, strict=True) if scheduled.samples]
        if not rows:
            return []
        if len(rows) != len(tokens):
            hidden = hidden.index_select(0, self._tensor(rows))
        requests = [_sample_request(scheduled) for scheduled in batch if scheduled.samples]
        return sample(self.model.logits(hidden), requests)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one page in all layers."""
        size = self.kv.layout.block_size
        pages = self.kv.data
        pages[:, :, target * size : (target + 1) * size].copy_(pages[:, :, source * size : (source + 1) * size])

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)


def _sample_request(scheduled: Scheduled) -> SampleRequest:
    sequence = scheduled.sequence
    return SampleRequest(
        params=sequence.spec.params,
        tokens=sequence.tokens,
        prompt_len=sequence.spec.prompt_len,
        position=len(sequence.tokens),
        eos_token_ids=sequence.spec.eos_token_ids,
    )
