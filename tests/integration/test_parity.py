"""Every family and option gives the reference's tokens, prefilled in one process and decoded in another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pdserve.launch import ModelPart
from pdserve.testing import Cluster
from tests.integration.suites import BLOCK, CHUNK, prompt, serve
from tests.reference import check_greedy
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 300)
ANSWER = 24
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {"rope_parameters": LINEAR}),
    "qwen3": ("qwen3", {"rope_parameters": YARN, "tie_word_embeddings": True}),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Cluster, Path]]:
    """One suite with five models side by side, each 1 prefill and 1 decode worker."""
    folder = tmp_path_factory.mktemp("families")
    for index, (name, (family, options)) in enumerate(MODELS.items()):
        make_tiny_model(folder / name, family, seed=index, **options)
    parts = [ModelPart(folder / name, name, prefill=1, decode=1) for name in MODELS]
    async with serve(folder / "logs", *parts) as suite:
        yield suite, folder


@pytest.mark.parametrize("name", MODELS)
async def test_greedy_tokens_and_logprobs(running: tuple[Cluster, Path], name: str) -> None:
    """All lengths at once; tokens equal but for near-ties, which are printed, and logprobs within 1e-4."""
    suite, folder = running
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    answers = await asyncio.gather(
        *(
            suite.client.complete(tokens, model=name, temperature=0.0, max_tokens=ANSWER, ignore_eos=True, logprobs=3)
            for tokens in prompts
        )
    )
    ties, worst = 0, 0.0
    for tokens, answer in zip(prompts, answers, strict=True):
        assert len(answer.tokens) == ANSWER
        logprobs = [token.logprob for token in answer.tokens if token.logprob is not None]
        verdict = check_greedy(folder / name, tokens, answer.token_ids, logprobs)
        assert verdict.mismatches == []
        assert answer.finish.usage.kv_transfer_bytes > 0
        for token in answer.tokens:
            assert [lp for _, lp in token.top] == sorted((lp for _, lp in token.top), reverse=True)
            assert token.top[0] == (token.id, token.logprob)
        ties, worst = ties + verdict.near_ties, max(worst, verdict.logprob_error)
    print(f"{name}: {ties} near-ties in {len(LENGTHS) * ANSWER} tokens, logprobs within {worst:.1e}")
    assert worst < 1e-4
    await suite.assert_all_free()


async def test_models_are_told_apart_by_name(running: tuple[Cluster, Path]) -> None:
    suite, _ = running
    assert sorted(model.name for model in await suite.client.models()) == sorted(MODELS)
    answers = [
        (await suite.client.complete(prompt(20), model=name, temperature=0.0, max_tokens=8, ignore_eos=True)).token_ids
        for name in MODELS
    ]
    assert len({tuple(answer) for answer in answers}) == len(MODELS)
