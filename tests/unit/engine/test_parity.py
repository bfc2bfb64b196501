"""The model computes what transformers computes, however a sequence is cut into steps and pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny_models import make_tiny_model
from tests.unit.engine.harness import Harness, random_tokens, reference_logprobs

TOLERANCE = 1e-4
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-head-dim": ("llama", {"head_dim": 32}),
    "llama-sharded": ("llama", {"max_shard_size": "100KB"}),
    "rope-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "rope-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "rope-yarn": ("qwen2", {"rope_parameters": YARN}),
    "rope-yarn-mscale": ("llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}}),
    "rope-yarn-smooth": ("llama", {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 24.0}}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 13}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-window": (
        "qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_decode_equal_transformers(tmp_path, variant):
    """A prompt in one chunk, then 16 greedy tokens through the cache, have transformers' log-probabilities."""
    family, options = VARIANTS[variant]
    folder = make_tiny_model(tmp_path, family, **options)
    run = Harness(folder)
    prompt = random_tokens(41)
    index = run.add(prompt)
    first = run.step({index: 40})
    decoded = run.greedy(index, 16)
    expected = reference_logprobs(folder, run.tokens[index][:-1])
    torch.testing.assert_close(torch.cat((first, decoded)), expected, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """A model with a full and a windowed layer, and its reference for one long sequence."""
    folder = make_tiny_model(
        tmp_path_factory.mktemp("model"),
        "qwen3",
        head_dim=16,
        use_sliding_window=True,
        sliding_window=21,
        max_window_layers=1,
    )
    tokens = random_tokens(150)
    return folder, tokens, reference_logprobs(folder, tokens)


@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("block_size", [1, 5, 16, 256])
def test_chunks_and_pages_change_nothing(windowed, block_size, scattered):
    """Chunks of any length over blocks of any size, side by side or not, give the same log-probabilities."""
    folder, tokens, expected = windowed
    run = Harness(folder, block_size, scattered=scattered)
    index = run.add(tokens, room=0)
    rows = [run.step({index: count}) for count in (1, 16, 3, 60, 1, 1, 29, 37, 2)]
    torch.testing.assert_close(torch.cat(rows), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("scattered", [True, False])
def test_a_mixed_batch_equals_its_sequences_alone(windowed, scattered):
    """First chunks, later chunks and decodes of unlike lengths in one batch do not see one another."""
    folder, _, _ = windowed
    run = Harness(folder, num_tokens=4096, scattered=scattered)
    lengths = [3, 700, 20, 41, 90, 640, 17, 60, 33]
    for seed, length in enumerate(lengths):
        run.add(random_tokens(length, seed), room=0)
    begun = {0: 2, 1: 699, 2: 10, 4: 89, 5: 600, 7: 59, 8: 1}
    run.step(begun)
    counts = {0: 1, 1: 1, 2: 10, 3: 41, 4: 1, 5: 40, 6: 17, 7: 1, 8: 32}
    rows = run.step(counts).split(list(counts.values()))
    for index, got in zip(counts, rows, strict=True):
        expected = reference_logprobs(folder, run.tokens[index])[-counts[index] :]
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


def test_layers_are_told_in_order_once_their_kv_is_written(windowed):
    """on_layer(i) comes after layer i's KV is in the cache and before layer i + 1's."""
    folder, tokens, _ = windowed
    run = Harness(folder)
    seen = []

    def on_layer(layer):
        seen.append((layer, [bool(run.kv.data[i].any()) for i in range(2)]))

    from pdserve.engine.attention import SequenceChunk

    meta = run.backend.build([SequenceChunk(20, 20, [3, 4])], run.kv)
    run.model.forward(torch.tensor(tokens[:20]), torch.arange(20), run.kv, meta, on_layer)
    assert seen == [(0, [True, False]), (1, [True, True])]
