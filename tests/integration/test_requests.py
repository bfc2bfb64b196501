"""Requests of every shape through one small suite: boundaries, hits, seeds, cancels, refusals, and no block left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pdserve.client import Completion, FinishReason, Output, SyncClient
from pdserve.core.errors import InvalidRequest, UnknownModel
from pdserve.launch import ModelPart
from pdserve.testing import Cluster
from tests.integration.suites import BLOCK, CHUNK, prompt, serve
from tests.reference import check_greedy
from tests.tiny_models import EOS_ID, VOCAB_SIZE, make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_MODEL_LEN = 256
SEEDED = {"temperature": 0.8, "top_p": 0.95, "top_k": 100, "seed": 11, "repetition_penalty": 1.1}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Cluster, Path]]:
    """1 prefill, 2 decode, 1 prefix cache."""
    folder = tmp_path_factory.mktemp("requests")
    model = make_tiny_model(folder / "model", "llama")
    part = ModelPart(model, "tiny", prefill=1, decode=2)
    async with serve(folder / "logs", part, prefix_caches=1, max_model_len=MAX_MODEL_LEN) as suite:
        yield suite, model


async def ask(suite: Cluster, tokens: list[int], **options: Any) -> Completion:
    return await suite.client.complete(tokens, **{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **options})


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, MAX_MODEL_LEN - 1])
async def test_boundaries(running: tuple[Cluster, Path], length: int) -> None:
    suite, model = running
    tokens = prompt(length, seed=length)
    answer = await ask(suite, tokens, max_tokens=min(12, MAX_MODEL_LEN - length))
    assert len(answer.tokens) == min(12, MAX_MODEL_LEN - length)
    assert answer.finish.reason is FinishReason.LENGTH
    assert check_greedy(model, tokens, answer.token_ids).mismatches == []
    assert [out.prompt_tokens for out in (answer.prompt, answer.finish.usage)] == [length, length]
    await suite.assert_all_free()


@pytest.mark.parametrize("length", [BLOCK * 3, BLOCK * 3 + 1, BLOCK * 3 + 5])
@pytest.mark.parametrize("options", [{}, SEEDED], ids=["greedy", "seeded"])
async def test_a_hit_gives_the_same_answer(running: tuple[Cluster, Path], length: int, options: dict[str, Any]) -> None:
    """Asked again, the prompt is cached: all of it, or all but a few tokens. Cached tokens are told as they are."""
    suite, _ = running
    tokens = prompt(length, seed=1000 + length)
    first = await ask(suite, tokens, **options, cache_salt=f"{length}{options}")
    again = await ask(suite, tokens, **options, cache_salt=f"{length}{options}")
    assert again.token_ids == first.token_ids
    assert first.finish.usage.cached_tokens == 0
    assert again.finish.usage.cached_tokens == (length - 1 if length % BLOCK == 0 else length // BLOCK * BLOCK)
    await suite.assert_all_free()


async def test_one_token_needs_no_decode_worker(running: tuple[Cluster, Path]) -> None:
    suite, model = running
    answer = await ask(suite, prompt(40, seed=5), max_tokens=1, logprobs=0)
    assert len(answer.tokens) == 1
    assert answer.finish.usage.decode_worker == ""
    assert check_greedy(model, prompt(40, seed=5), answer.token_ids).mismatches == []


async def test_the_end_of_sequence_as_first_token_ends_the_answer(running: tuple[Cluster, Path]) -> None:
    suite, _ = running
    answer = await ask(suite, prompt(30, seed=6), ignore_eos=False, logit_bias={EOS_ID: 100.0})
    assert (answer.token_ids, answer.text) == ([EOS_ID], "")
    assert (answer.finish.reason, answer.finish.stop_token_id) == (FinishReason.STOP, EOS_ID)
    held_back = await ask(suite, prompt(30, seed=6), ignore_eos=False, logit_bias={EOS_ID: 100.0}, min_tokens=4)
    assert len(held_back.tokens) == 5
    assert held_back.token_ids[-1] == EOS_ID
    await suite.assert_all_free()


async def test_a_stop_string_ends_the_text_before_it(running: tuple[Cluster, Path]) -> None:
    suite, _ = running
    whole = await ask(suite, prompt(30, seed=8), max_tokens=30, temperature=1.0, seed=3, top_k=200)
    stop = whole.text[4:7]
    assert len(stop) == 3
    stopped = await ask(suite, prompt(30, seed=8), max_tokens=30, temperature=1.0, seed=3, top_k=200, stop=stop)
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert (stopped.finish.reason, stopped.finish.stop_string) == (FinishReason.STOP, stop)
    await suite.assert_all_free()


async def test_text_streamed_in_pieces_is_the_whole_text(running: tuple[Cluster, Path]) -> None:
    """Indices are gapless over both phases, and the pieces add up."""
    suite, _ = running
    outputs = [
        event
        async for event in suite.client.generate(
            "Gr\u00fc\u00dfe \U0001f600", temperature=1.0, seed=4, max_tokens=40, ignore_eos=True
        )
        if isinstance(event, Output)
    ]
    tokens = [token for output in outputs for token in output.token_ids]
    assert len(tokens) == 40
    starts = [output.index for output in outputs]
    assert starts == [sum(len(output.tokens) for output in outputs[:i]) for i in range(len(outputs))]


@pytest.mark.parametrize(
    ("tokens", "options", "field"),
    [
        ([], {}, "token_ids.ids"),
        ([1, VOCAB_SIZE], {}, "token_ids.ids"),
        ([1], {"temperature": -1.0}, "sampling.temperature"),
        ([1], {"temperature": float("nan")}, "sampling.temperature"),
        ([1], {"top_p": 0.0}, "sampling.top_p"),
        ([1], {"top_p": 1.5}, "sampling.top_p"),
        ([1], {"min_p": -0.5}, "sampling.min_p"),
        ([1], {"max_tokens": 0}, "stopping.max_tokens"),
        ([1] * 200, {"max_tokens": 100}, "stopping.max_tokens"),
        ([1], {"logit_bias": {VOCAB_SIZE: 1.0}}, "sampling.logit_bias"),
        ([1], {"stop": ""}, "stopping.stop"),
        ([1], {"request_id": "x" * 129}, "request_id"),
    ],
)
async def test_bad_input_is_refused_by_field(
    running: tuple[Cluster, Path], tokens: list[int], options: dict[str, Any], field: str
) -> None:
    suite, _ = running
    with pytest.raises(InvalidRequest) as error:
        await ask(suite, tokens, **options)
    assert error.value.field == field
    if len(tokens) == 200:
        assert "200" in error.value.message and str(MAX_MODEL_LEN) in error.value.message
    assert sum(worker.outstanding_tokens for worker in await suite.client.fleet()) == 0


async def test_an_unknown_model_is_not_found(running: tuple[Cluster, Path]) -> None:
    suite, _ = running
    with pytest.raises(UnknownModel, match="nobody"):
        await ask(suite, [1], model="nobody")


async def test_the_blocking_client_sees_what_the_other_one_sees(running: tuple[Cluster, Path]) -> None:
    suite, _ = running
    options: Any = {"temperature": 0.9, "seed": 5, "max_tokens": 12, "ignore_eos": True, "request_id": "both"}

    def ask() -> list[Any]:
        with SyncClient(suite.endpoint) as client:
            answer = client.complete("hello", **options)
            tokens = client.tokenize("hello", token_bytes=True)
            text = client.detokenize(tokens.ids)
            told = [client.models(), tokens, text, client.traces(1)[0].request_id, client.trace("both").request.model]
            measured = [model.model for model in client.stats().models]
            workers = sorted(worker.worker_id for worker in client.fleet())
            return [answer.token_ids, answer.text, *told, measured, workers]

    blocking = await asyncio.to_thread(ask)
    client = suite.client
    answer = await client.complete("hello", **options)
    tokens = await client.tokenize("hello", token_bytes=True)
    text = await client.detokenize(tokens.ids)
    [latest] = await client.traces(1)
    trace = await client.trace("both")
    told = [await client.models(), tokens, text, latest.request_id, trace.request.model]
    measured = [model.model for model in (await client.stats()).models]
    workers = sorted(worker.worker_id for worker in await client.fleet())
    assert blocking == [answer.token_ids, answer.text, *told, measured, workers]
    assert (text, latest.request_id, trace.request.model, measured) == ("hello", "both", "tiny", ["tiny"])


async def test_many_at_once_with_random_cancels(running: tuple[Cluster, Path]) -> None:
    """64 requests of mixed lengths, a third cancelled at random: the others are right, and no block is owned."""
    suite, model = running
    chance = random.Random(7)
    jobs = [
        (prompt(chance.randint(1, 200), seed=2000 + i), chance.random() < 0.33, chance.randint(0, 20))
        for i in range(64)
    ]

    async def one(tokens: list[int], cancelled: bool, after: int) -> list[int] | None:
        received: list[int] = []
        stream = suite.client.generate(tokens, temperature=0.0, max_tokens=24, ignore_eos=True)
        async with aclosing(stream):
            async for event in stream:
                if isinstance(event, Output):
                    received += event.token_ids
                if cancelled and len(received) >= after:
                    return None
        return received

    answers = await asyncio.gather(*(one(*job) for job in jobs))
    for (tokens, cancelled, _), answer in zip(jobs, answers, strict=True):
        if not cancelled:
            assert answer is not None
            assert len(answer) == 24
            assert check_greedy(model, tokens, answer).mismatches == []
    await suite.assert_all_free()
    used = {
        worker.worker_id
        for worker in await suite.client.fleet()
        if worker.role == "decode" and worker.kv_bytes_received
    }
    assert used == {"decode-0", "decode-1"}
