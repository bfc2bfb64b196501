"""One request, many ways: whichever path computes it, however small the pool, the tokens are the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pdserve.launch import ModelPart
from tests.integration.suites import prompt, serve
from tests.reference import check_greedy
from tests.tiny_models import make_tiny_model

SEEDED = {"temperature": 0.9, "top_p": 0.9, "min_p": 0.01, "seed": 5, "presence_penalty": 0.5}
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    (prompt(length, seed=length), options) for length in (5, 48, 150) for options in ({"temperature": 0.0}, SEEDED)
]
ANSWER = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("paths"), "llama")


async def answers(logs: Path, part: ModelPart, **options: Any) -> tuple[list[list[int]], int]:
    """The tokens of REQUESTS, all asked at once, and how often one was continued elsewhere."""
    async with serve(logs, part, **options) as suite:
        done = await asyncio.gather(
            *(suite.client.complete(t, max_tokens=ANSWER, ignore_eos=True, **o) for t, o in REQUESTS)
        )
        await suite.all_free()
    return [answer.token_ids for answer in done], sum(answer.finish.usage.replays for answer in done)


async def test_paths_agree(model: Path, tmp_path: Path) -> None:
    """Remote prefill, local prefill with other blocks and chunks, and a decode pool too small for all at once."""
    remote, _ = await answers(tmp_path / "remote", ModelPart(model, "tiny", prefill=1, decode=1))
    for (tokens, options), answer in zip(REQUESTS, remote, strict=True):
        assert len(answer) == ANSWER
        if options == {"temperature": 0.0}:
            assert check_greedy(model, tokens, answer).mismatches == []
    local, _ = await answers(
        tmp_path / "local", ModelPart(model, "tiny", colocated=1), block_size=8, max_num_batched_tokens=23
    )
    assert local == remote
    layer_token_bytes = 2 * 2 * 16 * 4  # K and V, KV heads, head size, float32; the tiny model has 2 layers
    pool = 18 * 16 * 2 * layer_token_bytes
    small, replays = await answers(
        tmp_path / "small",
        ModelPart(model, "tiny", prefill=1, decode=1),
        max_model_len=256,
        lookahead_tokens=0,
        per_worker={"decode-0": {"kv-cache-memory": pool}},
    )
    assert small == remote
    assert replays > 0
