"""Many requests over one stream, against a live suite."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.client import (
    Completion,
    Event,
    EventStream,
    Finish,
    Output,
    PromptInfo,
    Session,
    SyncClient,
    Tokenization,
)
from pdserve.client.exchange import Collector
from pdserve.client.session import Broken
from pdserve.core.errors import InvalidRequest, PdserveError, Unavailable, UnknownModel
from pdserve.launch import ModelPart
from pdserve.rpc.errors import RpcError
from pdserve.testing import Cluster
from tests.integration.suites import prompt, serve
from tests.tiny_models import make_tiny_model

OPTIONS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    part = ModelPart(make_tiny_model(tmp_path / "model"), "tiny", prefill=1, decode=1)
    async with serve(tmp_path / "logs", part) as cluster:
        yield cluster


async def collect(stream: EventStream) -> Completion:
    answer = Collector()
    async with stream as events:
        async for event in events:
            answer.add(event)
    return answer.completion()


async def test_each_request_gets_what_generate_would_send(cluster: Cluster) -> None:
    """32 at once over one stream: tokens, text, order of events and refusals are those of a call of its own."""
    prompts = [prompt(5 + index, seed=index) for index in range(32)]
    expected = [await cluster.client.complete(given, **OPTIONS) for given in prompts[:4]]
    async with Session(cluster.endpoint) as session:
        answers = await asyncio.gather(*(collect(session.generate(given, **OPTIONS)) for given in prompts))
        for answer, other in zip(answers, expected, strict=False):
            assert (answer.token_ids, answer.text) == (other.token_ids, other.text)
        assert all(len(answer.tokens) == 24 for answer in answers)
        events: list[Event] = [event async for event in session.generate("hello", logprobs=1, **OPTIONS)]
        kinds = [type(event) for event in events]
        assert kinds[0] is PromptInfo and kinds[-1] is Finish and set(kinds[1:-1]) == {Output}
        starts = [(event.index, len(event.tokens)) for event in events if isinstance(event, Output)]
        assert [index for index, _ in starts] == [sum(n for _, n in starts[:at]) for at in range(len(starts))]
        refusals: list[tuple[dict[str, Any], type[PdserveError]]] = [
            ({"top_p": 7.0}, InvalidRequest),
            ({"model": "nobody"}, UnknownModel),
        ]
        for options, error in refusals:
            with pytest.raises(error):
                await collect(session.generate("hello", **options))
        assert (await collect(session.generate("hello", **OPTIONS))).tokens  # the stream lives on
    await cluster.assert_all_free()


async def test_a_reader_that_lags_gets_what_gathered_as_one(cluster: Cluster) -> None:
    """All tokens that came meanwhile, in one Output with their text."""
    expected = await cluster.client.complete("hello", **OPTIONS)
    async with Session(cluster.endpoint) as session:
        async with session.generate("hello", **OPTIONS) as events:
            await anext(events)
            await collect(session.generate("hello", **{**OPTIONS, "max_tokens": 60}))  # longer than the first takes
            outputs = [event async for event in events if isinstance(event, Output)]
        assert len(outputs) < 24 and max(len(output.tokens) for output in outputs) > 1
        assert [token for output in outputs for token in output.token_ids] == expected.token_ids
        assert "".join(output.text for output in outputs) == expected.text


async def test_leaving_cancels_on_the_server(cluster: Cluster) -> None:
    async with Session(cluster.endpoint) as session:
        async with session.generate("hello", **{**OPTIONS, "max_tokens": 900}) as events:
            await anext(events)
            await anext(events)
        await cluster.assert_all_free()
        async with session.generate("hello", **{**OPTIONS, "max_tokens": 900}) as events:
            await anext(events)
            await session.close()
            with pytest.raises(RpcError, match="closed"):
                while True:
                    await anext(events)
        with pytest.raises(RpcError, match="closed"):
            await collect(session.generate("hello"))
    await cluster.assert_all_free()


async def test_a_lost_router_is_unavailable_for_all(cluster: Cluster) -> None:
    assert cluster.suite.router is not None
    async with Session(cluster.endpoint) as session:
        streams = [session.generate("hello", **{**OPTIONS, "max_tokens": 900}) for _ in range(3)]
        for stream in streams:
            await anext(stream)
        cluster.suite.router.kill()
        outcomes = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Broken] * 3 and issubclass(Broken, Unavailable)
        with pytest.raises(Unavailable):
            await collect(session.generate("hello"))
    await cluster.assert_all_free()


async def test_both_clients_tokenize_as_generate_does(cluster: Cluster) -> None:
    """Ids, their bytes, and back; a chat is what its template makes of it."""
    given, chat = "Gr\u00fc\u00dfe \U0001f600", [{"role": "user", "content": "hello"}]
    found = await cluster.client.tokenize(given, token_bytes=True)
    assert (found.ids, b"".join(found.token_bytes)) == (tuple(given.encode()), given.encode())
    assert await cluster.client.detokenize(found.ids) == given
    with_special = (await cluster.client.tokenize(chat)).ids
    assert len(with_special) == (await cluster.client.complete(chat, max_tokens=1)).prompt.prompt_tokens
    plain = await cluster.client.detokenize(with_special, skip_special_tokens=True)
    assert "<|im_start|>" in await cluster.client.detokenize(with_special) and "<|im_start|>" not in plain

    def blocking() -> tuple[Tokenization, str]:
        with SyncClient(cluster.endpoint) as client:
            return client.tokenize(given, token_bytes=True), client.detokenize(found.ids)

    assert await asyncio.to_thread(blocking) == (found, given)
    with pytest.raises(InvalidRequest) as error:
        await cluster.client.detokenize([10_000])
    assert error.value.field == "ids"
    with pytest.raises(UnknownModel):
        await cluster.client.tokenize("a", model="nobody")
