"""A router that is killed in the middle of an answer: another one goes on with it, token for token."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pdserve.client import Client, Completion, Event, Output, Retry, SyncClient
from pdserve.client.exchange import Collector
from pdserve.launch import ModelPart, Service
from pdserve.rpc.channel import connect
from pdserve.testing import Cluster
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc
from tests.integration.extra_service import service
from tests.integration.suites import prompt, serve
from tests.tiny_models import make_tiny_model

PROMPT = prompt(70, seed=3)
# What a replay has to get right: penalties count what was shown, logprobs stay with their tokens.
OPTIONS: dict[str, Any] = {
    "max_tokens": 300, "ignore_eos": True, "temperature": 0.9, "seed": 11, "frequency_penalty": 0.4, "logprobs": 2,
}  # fmt: skip
BEFORE = 5  # tokens that are shown before the router dies


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    part = ModelPart(make_tiny_model(tmp_path / "model", max_position_embeddings=8192), "tiny", prefill=1, decode=1)
    async with serve(tmp_path / "logs", part, max_model_len=4096) as cluster:
        yield cluster


def second_router(cluster: Cluster, folder: Path, *flags: str) -> Any:
    """One more, in front of the same workers."""
    workers = [word for worker in cluster.workers.values() for word in ("--worker", worker.endpoint)]
    model = ("--model", f"tiny={folder / 'model'}")
    secret = ("--internal-secret-file", str(cluster.suite.internal_secret_file))
    more = (*secret, *flags, "--no-local-prefill", "--port", "0")
    return service("router", *model, *workers, *more, logs=folder / "logs")


def killing(router: Service, answer: Collector, event: Event) -> None:
    """Take `event`, and kill the router once BEFORE tokens are there."""
    answer.add(event)
    if isinstance(event, Output) and event.index <= BEFORE < event.index + len(event.tokens):
        router.kill()


def same(answer: Completion, expected: Completion) -> bool:
    """Everything that was shown, probabilities but for what another order of sums makes of them."""
    assert answer.token_ids == expected.token_ids and answer.text == expected.text
    assert answer.finish.reason == expected.finish.reason
    for ours, theirs in zip(answer.tokens, expected.tokens, strict=True):
        assert len(ours.top) == len(theirs.top)
        assert theirs.logprob is None or ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
    return True


@pytest.mark.parametrize("kind", [Client, SyncClient])
async def test_a_client_goes_on_at_another_router(
    cluster: Cluster, tmp_path: Path, kind: type[Client] | type[SyncClient]
) -> None:
    expected = await cluster.client.complete(PROMPT, **OPTIONS)
    retries: list[Retry] = []
    async with second_router(cluster, tmp_path) as router:
        answer = Collector()
        targets = [router.endpoint, cluster.endpoint]
        if kind is Client:
            async with Client(targets, on_retry=retries.append) as client:
                async for event in client.generate(PROMPT, **OPTIONS):
                    killing(router, answer, event)
        else:

            def read() -> None:
                with SyncClient(targets, on_retry=retries.append) as client:
                    for event in client.generate(PROMPT, **OPTIONS):
                        killing(router, answer, event)

            await asyncio.to_thread(read)
        assert same(answer.completion(), expected)
        assert [(retry.number, retry.delay) for retry in retries] == [(1, 0.0)]
        await router.exited
    await cluster.assert_all_free()


async def test_an_answer_that_a_drain_cannot_wait_for_goes_on_elsewhere(cluster: Cluster, tmp_path: Path) -> None:
    """So routers are restarted one after the other without losing anything."""
    options = {**OPTIONS, "max_tokens": 3000, "logprobs": None, "frequency_penalty": 0.0}
    expected = await cluster.client.complete(PROMPT, **options)
    async with second_router(cluster, tmp_path, "--drain-seconds", "0.1") as router:
        answer, retries = Collector(), list[Retry]()
        async with Client([router.endpoint, cluster.endpoint], on_retry=retries.append) as client:
            async for event in client.generate(PROMPT, **options):
                answer.add(event)
                if isinstance(event, Output) and event.index == 0:
                    router.terminate()
        assert same(answer.completion(), expected) and len(retries) == 1
        assert await router.exited == 0
    await cluster.assert_all_free()


async def test_a_gateway_goes_on_at_another_router(cluster: Cluster, tmp_path: Path) -> None:
    """The HTTP client sees nothing of it."""
    expected = await cluster.client.complete(PROMPT, **{**OPTIONS, "logprobs": None})
    async with second_router(cluster, tmp_path) as router:
        flags = ("--router", router.endpoint, "--router", cluster.endpoint, "--port", "0")
        async with service("gateway", *flags, logs=tmp_path / "logs") as gateway:
            url = f"http://{gateway.endpoint}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
                await both_asked(client, cluster.client, router)
                stream = await client.completions.create(
                    model="tiny", prompt=PROMPT, max_tokens=300, temperature=0.9, seed=11, frequency_penalty=0.4,
                    stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
                )  # fmt: skip
                text, usage = "", None
                async for chunk in stream:
                    if not text:
                        router.kill()  # the first of the two that stand idle
                    text += "".join(choice.text for choice in chunk.choices)
                    usage = chunk.usage or usage
        assert text == expected.text and usage is not None and usage.completion_tokens == 300
        assert '"answer_moved"' in (tmp_path / "logs" / "extra-gateway.log").read_text()
        await router.exited
    await cluster.assert_all_free()


async def both_asked(client: openai.AsyncOpenAI, one: Client, router: Service) -> None:
    """Ask until the gateway has asked both routers, of which it hears one after the other."""
    async with Client(router.endpoint) as other, asyncio.timeout(60):
        waiting = [one, other]
        for number in itertools.count():
            headers = {"x-request-id": f"warm-{number}"}
            asked = [
                client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2, extra_headers=headers)
                for _ in range(8)
            ]
            await asyncio.gather(*asked)
            waiting = [w for w in waiting if not any(t.request_id.startswith("warm") for t in await w.traces(50))]
            if not waiting:
                return


async def test_what_cannot_be_resumed_is_said(cluster: Cluster) -> None:
    whole = await cluster.client.complete(PROMPT, max_tokens=8, temperature=0, ignore_eos=True)
    async with connect(cluster.endpoint) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        def asked(tokens: list[int]) -> pb.GenerateRequest:
            return pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=PROMPT),
                sampling=pb.SamplingOptions(temperature=0),
                stopping=pb.StoppingOptions(max_tokens=8, ignore_eos=True),
                resume=pb.TokenIds(ids=tokens),
            )

        for count in (1, 7):
            outputs = [r.output async for r in stub.Generate(asked(whole.token_ids[:count])) if r.HasField("output")]
            assert outputs[0].index == count
            assert [token.id for output in outputs for token in output.tokens] == whole.token_ids[count:]
        # All of it is there: only the end was lost.
        kinds = [r.WhichOneof("event") async for r in stub.Generate(asked(whole.token_ids))]
        assert kinds == ["prompt", "finish"]
