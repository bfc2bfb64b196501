"""The gateway in front of a live suite, asked by OpenAI's own Python client and by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from pdserve.launch import ModelPart
from pdserve.testing import Cluster
from tests.integration.raw_http import JSON, ask
from tests.integration.suites import BLOCK, prompt, serve
from tests.tiny_models import EOS_ID, VOCAB_SIZE, make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_MODEL_LEN = 256
MESSAGES: Any = [{"role": "user", "content": "hello"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
IGNORE_EOS = {"ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """1 router, 1 prefill, 2 decode, 1 prefix cache, 1 gateway."""
    folder = tmp_path_factory.mktemp("gateway")
    part = ModelPart(make_tiny_model(folder / "tiny"), "tiny", prefill=1, decode=2)
    flags = {"gateway-0": {"max-body-size": 1 << 16, "max-prompts": 8, "body-seconds": 1.0}}
    options: dict[str, Any] = {"prefix_caches": 1, "gateways": 1, "per_worker": flags, "max_model_len": MAX_MODEL_LEN}
    async with serve(folder / "logs", part, **options) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.http}/v1", api_key="unused", max_retries=0) as client:
        yield client
    await cluster.assert_all_free()


async def text(cluster: Cluster, given: Any, **options: Any) -> str:
    """What the gRPC API answers."""
    return (await cluster.client.complete(given, **{"temperature": 0.0, "max_tokens": 8, **options})).text


async def test_a_chat_is_what_grpc_answers(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=IGNORE_EOS, **GREEDY)
    assert answer.choices[0].message.content == await text(cluster, MESSAGES, ignore_eos=True)
    assert (answer.object, answer.model, answer.choices[0].finish_reason) == ("chat.completion", "tiny", "length")
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (8, answer.usage.prompt_tokens + 8)


async def test_a_streamed_chat_is_the_whole_one(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    """Role first, then text, then the finish, then usage with the cached tokens of a prompt that was asked before."""
    messages: Any = [{"role": "user", "content": "a prompt of more than one block, so that it can be cached"}]
    options: Any = {"model": "tiny", "messages": messages, "extra_body": IGNORE_EOS, **GREEDY}
    whole = await client.chat.completions.create(**options)
    stream = await client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    *chunks, last = [chunk async for chunk in stream]
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == [] and last.usage is not None and whole.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens
    assert last.usage.prompt_tokens_details is not None
    assert (last.usage.prompt_tokens_details.cached_tokens or 0) >= BLOCK


async def test_the_stream_on_the_wire(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    """Framing, headers and the last event, to the byte."""
    body = {"messages": MESSAGES, "stream": True, **GREEDY, **IGNORE_EOS}
    reply = await ask(f"{cluster.http}/v1/chat/completions", body)
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.body.endswith(b"\n\ndata: [DONE]\n\n")
    *events, done = reply.events
    assert done == "[DONE]"
    assert all(set(event) == {"id", "object", "created", "model", "choices"} for event in events)
    assert {event["id"] for event in events} == {reply.headers["x-request-id"]}


@pytest.mark.parametrize("given", ["hello", [104, 101, 108, 108, 111]], ids=["text", "ids"])
async def test_a_completion_of_one_prompt(cluster: Cluster, client: openai.AsyncOpenAI, given: Any) -> None:
    answer = await client.completions.create(model="tiny", prompt=given, extra_body=IGNORE_EOS, **GREEDY)
    assert answer.choices[0].text == await text(cluster, given, ignore_eos=True)
    assert answer.usage is not None and answer.usage.prompt_tokens == 5


@pytest.mark.parametrize("given", [["one", "two", "three"], [[1], [2, 3], [4]]], ids=["texts", "ids"])
async def test_several_prompts_are_answered_in_their_order(
    cluster: Cluster, client: openai.AsyncOpenAI, given: Any
) -> None:
    expected = [await text(cluster, prompt, ignore_eos=True) for prompt in given]
    options: Any = {"model": "tiny", "prompt": given, "extra_body": IGNORE_EOS, **GREEDY}
    answer = await client.completions.create(**options)
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(expected))
    assert answer.usage is not None and answer.usage.completion_tokens == 24
    streamed = ["", "", ""]
    finished = []
    async for chunk in await client.completions.create(**options, stream=True):
        [choice] = chunk.choices
        streamed[choice.index] += choice.text
        finished += [choice.index] if choice.finish_reason else []
    assert streamed == expected and sorted(finished) == [0, 1, 2]


async def test_a_seed_and_every_option_mean_what_they_mean_in_grpc(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    """One request with everything set: the same tokens as gRPC makes of the same values."""
    answer = await client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_completion_tokens=20,
        temperature=0.9,
        top_p=0.95,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={"65": 3, "66": -100},
        seed=7,
        stop=["\x00"],
        user="somebody",
        metadata={"team": "a"},
        extra_body={
            "top_k": 50,
            "min_p": 0.01,
            "repetition_penalty": 1.1,
            "min_tokens": 4,
            "stop_token_ids": [70],
            "skip_special_tokens": False,
            "cache_salt": "salt",
            "priority": -3,
            **IGNORE_EOS,
        },
    )
    same = await cluster.client.complete(
        MESSAGES, max_tokens=20, temperature=0.9, top_p=0.95, frequency_penalty=0.5, presence_penalty=-0.5,
        logit_bias={65: 3.0, 66: -100.0}, seed=7, stop=["\x00"], top_k=50, min_p=0.01, repetition_penalty=1.1,
        min_tokens=4, stop_token_ids=[70], skip_special_tokens=False, ignore_eos=True,
    )  # fmt: skip
    assert answer.choices[0].message.content == same.text
    assert answer.usage is not None and answer.usage.completion_tokens == len(same.tokens)


async def test_ends_and_what_matched(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    """The end-of-sequence token, a stop string, a stop token, and the limit; vLLM's stop_reason tells them apart."""
    url = f"{cluster.http}/v1/completions"

    async def end(**fields: Any) -> tuple[str, Any]:
        [choice] = (await ask(url, {"prompt": "hello", "temperature": 0, **fields})).json["choices"]
        return choice["finish_reason"], choice["stop_reason"]

    whole = await text(cluster, "hello", max_tokens=12, ignore_eos=True)
    assert await end(max_tokens=3, ignore_eos=True) == ("length", None)
    assert await end(logit_bias={str(EOS_ID): 100}) == ("stop", None)
    assert await end(logit_bias={"70": 100}, stop_token_ids=[70]) == ("stop", 70)
    assert await end(max_tokens=12, stop=whole[3:5], ignore_eos=True) == ("stop", whole[3:5])


async def test_chat_logprobs(client: openai.AsyncOpenAI) -> None:
    """Greedy: each token is the likeliest, and the bytes of all of them are the text."""
    options: Any = {"model": "tiny", "messages": MESSAGES, "logprobs": True, "top_logprobs": 3}
    options |= {**GREEDY, "extra_body": {**IGNORE_EOS, "skip_special_tokens": False}}
    [choice] = (await client.chat.completions.create(**options)).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    entries = choice.logprobs.content
    assert len(entries) == 8 and all(len(entry.top_logprobs) == 3 for entry in entries)
    assert all(entry.logprob == entry.top_logprobs[0].logprob <= 0 for entry in entries)
    data = b"".join(bytes(entry.bytes or []) for entry in entries)
    assert data.decode(errors="replace") == choice.message.content
    streamed = []
    async for chunk in await client.chat.completions.create(**options, stream=True):
        for part in chunk.choices:
            streamed += (part.logprobs.content or []) if part.logprobs else []
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]


async def test_completion_logprobs(client: openai.AsyncOpenAI) -> None:
    options: Any = {"model": "tiny", "prompt": "hello", "logprobs": 2, **GREEDY}
    options["extra_body"] = {**IGNORE_EOS, "skip_special_tokens": False}
    [choice] = (await client.completions.create(**options)).choices
    found = choice.logprobs
    assert found is not None and found.tokens and found.token_logprobs and found.top_logprobs and found.text_offset
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 8
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values()) and len(top) == 2
    assert found.text_offset[0] == 0 and found.text_offset == sorted(found.text_offset)
    offsets: list[int] = []
    async for chunk in await client.completions.create(**options, stream=True):
        if chunk.choices[0].logprobs:
            offsets += chunk.choices[0].logprobs.text_offset or []
    assert offsets == found.text_offset


async def test_what_the_router_refuses_is_a_400_with_the_clients_own_name(client: openai.AsyncOpenAI) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": MAX_MODEL_LEN}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"messages": [{"role": "", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "messages"),
        ({"n": 2}, "n"),
        ({"extra_body": {"min_p": 2}}, "min_p"),
        ({"extra_body": {"max_tokns": 2}}, "max_tokns"),
    ]
    for fields, param in cases:
        with pytest.raises(openai.BadRequestError) as error:
            await client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **fields})
        assert (error.value.param, error.value.type) == (param, "invalid_request_error"), fields
    with pytest.raises(openai.BadRequestError) as error:
        await client.completions.create(model="tiny", prompt=[[1], [VOCAB_SIZE]])
    assert error.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as error:
        await client.completions.create(model="tiny", prompt=["a"] * 9)
    assert error.value.param == "prompt"


async def test_a_stream_that_is_refused_is_no_stream(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        await client.chat.completions.create(model="nobody", messages=MESSAGES, stream=True)
    assert (error.value.code, error.value.param) == ("model_not_found", "model")


async def test_models(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    [model] = (await client.models.list()).data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "pdserve")
    assert model.model_extra is not None and model.model_extra["max_model_len"] == MAX_MODEL_LEN
    assert (await client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("some/other")


async def test_tokenize_and_detokenize(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    given = "Gr\u00fc\u00dfe"
    found = (await ask(f"{cluster.http}/tokenize", {"prompt": given, "return_token_strs": True})).json
    assert (found["tokens"], found["count"], found["max_model_len"]) == (list(given.encode()), 7, MAX_MODEL_LEN)
    assert found["token_strs"][:3] == ["G", "r", "\\xc3"]
    back = (await ask(f"{cluster.http}/detokenize", {"tokens": found["tokens"], "model": "tiny"})).json
    assert back == {"prompt": given}
    chat = (await ask(f"{cluster.http}/tokenize", {"messages": MESSAGES})).json
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, **GREEDY)
    assert answer.usage is not None and chat["count"] == answer.usage.prompt_tokens and chat["token_strs"] is None
    for path, body, param in (
        ("tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("tokenize", {"prompt": "x" * 20000}, "prompt"),
        ("detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("detokenize", {"tokens": [1], "model": "nobody"}, "model"),
    ):
        reply = await ask(f"{cluster.http}/{path}", body)
        assert (reply.status in (400, 404), reply.error["param"]) == (True, param)


async def test_ids_and_traces_go_through(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    """The caller's id comes back, stands in the answer, and is the router's too; so is the caller's trace."""
    body = {"messages": MESSAGES, **GREEDY}
    url = f"{cluster.http}/v1/chat/completions"
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    own = {
        "x-request-id": "my id 1",
        "authorization": "Bearer whatever",
        "traceparent": f"00-{trace_id}-b7ad6b7169203331-01",
    }
    reply = await ask(url, body, {**JSON, **own})
    assert reply.headers["x-request-id"] == reply.json["id"] == "my id 1"
    [latest] = await cluster.client.traces(1)
    assert (latest.request_id, latest.trace_id) == ("my id 1", trace_id)
    for wrong in ("x" * 121, "caf\xe9"):
        reply = await ask(url, body, {**JSON, "x-request-id": wrong})
        assert (reply.status, reply.error["param"]) == (400, "x-request-id")
        assert reply.headers["x-request-id"].startswith("req-")


async def test_bodies_that_no_client_should_send(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    url = f"{cluster.http}/v1/completions"
    big = json.dumps({"prompt": "x" * (1 << 16)}).encode()
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(big), big)
    replies = [
        await ask(url, big),
        await ask(url, chunked, {**JSON, "transfer-encoding": "chunked", "content-length": ""}),
        await ask(url, b"{}", {"content-type": "text/plain"}),
        await ask(url, b"{}", {}),
        await ask(url, b"{", {**JSON, "content-length": "100"}),  # and then nothing
        await ask(url, b"not json"),
        await ask(url),
        await ask(f"{cluster.http}/nowhere"),
        await ask(f"{cluster.http}/completions", b"{}"),
    ]
    assert [reply.status for reply in replies] == [413, 413, 415, 415, 408, 400, 405, 404, 404]
    assert all(set(reply.error) == {"message", "type", "param", "code"} for reply in replies)
    assert replies[6].headers["allow"] == "POST" and "it takes POST" in replies[6].error["message"]
    assert replies[8].error["message"] == "POST /completions: Not Found; did you mean /v1/completions?"
    assert "x" * 100 not in replies[0].error["message"]


async def test_health_version_and_metrics(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    assert (await ask(f"{cluster.http}/health")).status == 200
    assert (await ask(f"{cluster.http}/version")).json["version"]
    route = {"route": "/v1/completions"}

    async def metrics() -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        page = (await ask(f"{cluster.http}/metrics")).body.decode()
        families = text_string_to_metric_families(page)
        return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}

    def value(found: Any, name: str, **labels: str) -> float:
        return float(found.get((f"pdserve_gateway_{name}", frozenset(labels.items())), 0.0))

    before = await metrics()
    await client.completions.create(model="tiny", prompt=prompt(20), **GREEDY)
    async for _ in await client.completions.create(model="tiny", prompt=prompt(20), stream=True, **GREEDY):
        pass
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model="tiny", prompt="a", top_p=0)
    await ask(f"{cluster.http}/one-more-path")
    after = await metrics()
    for name, labels, more in (
        ("requests_total", {**route, "status": "200"}, 2),
        ("requests_total", {**route, "status": "400"}, 1),
        ("requests_total", {"route": "other", "status": "404"}, 1),
        ("request_duration_seconds_count", route, 3),
        ("time_to_first_token_seconds_count", route, 2),
    ):
        assert value(after, name, **labels) - value(before, name, **labels) == more, name
    assert value(after, "requests_in_flight", **route) == 0
    assert value(after, "requests_in_flight", route="/metrics") == 1
    assert not any("one-more-path" in str(labels) for _, labels in after)


async def test_many_at_once(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    """Streams, whole answers, chats and completions side by side: each is its own."""
    prompts = [prompt(10 + index, seed=index) for index in range(16)]
    expected = [await text(cluster, given, ignore_eos=True) for given in prompts]

    async def one(index: int) -> str:
        options: Any = {"model": "tiny", "prompt": prompts[index], "extra_body": IGNORE_EOS, **GREEDY}
        if index % 2:
            return (await client.completions.create(**options)).choices[0].text
        stream = await client.completions.create(**options, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    assert await asyncio.gather(*map(one, range(16))) == expected
