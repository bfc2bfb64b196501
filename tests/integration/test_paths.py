"""One request, many ways: whichever path computes it, however small the pool, the tokens are the same."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from pdserve.client import Completion
from pdserve.launch import ModelPart
from pdserve.testing import wait_load
from tests.integration.suites import prompt, serve
from tests.reference import check_greedy
from tests.tiny_models import make_tiny_model

SEEDED = {"temperature": 0.9, "top_p": 0.9, "min_p": 0.01, "seed": 5, "presence_penalty": 0.5}
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    (prompt(length, seed=length), options) for length in (5, 48, 150) for options in ({"temperature": 0.0}, SEEDED)
]
ANSWER = 90  # so that those that fit at first grow beyond the small pool
OTHER_HOST = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"  # links must not assume one address
LAYER_TOKEN_BYTES = 2 * 2 * 16 * 4  # K and V, KV heads, head size, float32; the tiny model has 2 layers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("paths"), "llama")


async def answers(logs: Path, part: ModelPart, **options: Any) -> tuple[list[list[int]], int]:
    """The tokens of REQUESTS, all asked at once, and how often one was continued elsewhere."""
    async with serve(logs, part, **options) as suite:
        done = await asyncio.gather(
            *(suite.client.complete(t, max_tokens=ANSWER, ignore_eos=True, **o) for t, o in REQUESTS)
        )
        await suite.assert_all_free()
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
    either, _ = await answers(
        tmp_path / "either", ModelPart(model, "tiny", prefill=1, decode=1), local_prefill=True, max_num_seqs=4
    )
    assert either == remote
    pool = 18 * 16 * 2 * LAYER_TOKEN_BYTES
    small, replays = await answers(
        tmp_path / "small",
        ModelPart(model, "tiny", prefill=1, decode=1),
        max_model_len=256,
        lookahead_tokens=0,
        per_worker={"decode-0": {"kv-cache-memory": pool, "kv-host": OTHER_HOST}},
    )
    assert small == remote
    assert replays > 0


async def test_what_was_evicted_comes_from_the_prefix_cache(model: Path, tmp_path: Path) -> None:
    """Both workers' pools have forgotten a prompt; its KV is fetched, and the answer is the same."""
    pool = {"kv-cache-memory": 18 * 16 * 2 * LAYER_TOKEN_BYTES}
    part = ModelPart(model, "tiny", prefill=1, decode=1)
    async with serve(
        tmp_path, part, prefix_caches=1, max_model_len=256, per_worker={"prefill-0": pool, "decode-0": pool}
    ) as suite:

        async def ask(seed: int) -> Completion:
            return await suite.client.complete(prompt(200, seed), temperature=0.0, max_tokens=8, ignore_eos=True)

        first = await ask(1)
        await wait_load(
            suite.suite.caches[0].endpoint, lambda load: load.cached_blocks >= 200 // 16, access=suite.access
        )
        for seed in (2, 3):
            await ask(seed)
        again = await ask(1)
        await suite.assert_all_free()
    assert again.token_ids == first.token_ids
    assert first.finish.usage.cached_tokens == 0
    assert again.finish.usage.cached_tokens == 192
    assert again.finish.usage.prefill_worker == "prefill-0"


async def test_what_the_router_places_is_not_refused(model: Path, tmp_path: Path) -> None:
    """A large look-ahead and a small pool: the second request waits for room instead of being tried again and again."""
    pool = {"kv-cache-memory": 64 * 16 * 2 * LAYER_TOKEN_BYTES}
    part = ModelPart(model, "tiny", prefill=1, decode=1)
    async with serve(tmp_path, part, lookahead_tokens=600, max_model_len=1024, per_worker={"decode-0": pool}) as suite:
        done = await asyncio.gather(
            *(
                suite.client.complete(prompt(100, seed), temperature=0.0, max_tokens=700, ignore_eos=True)
                for seed in (1, 2)
            )
        )
        await suite.assert_all_free()
    assert [len(answer.tokens) for answer in done] == [700, 700]
    assert [answer.finish.usage.replays for answer in done] == [0, 0]
