"""The door of a live suite: each tenant has its share, and who would come too late is told so at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from pdserve.client import Client, PromptInfo
from pdserve.core.errors import InvalidRequest, TenantLimited, TooLate
from pdserve.launch import ModelPart
from pdserve.rpc.channel import connect
from pdserve.rpc.errors import PUSHBACK_KEY, error_from_call
from pdserve.testing import Cluster
from pdserve.v1 import inference_pb2
from pdserve.v1.inference_pb2_grpc import InferenceServiceStub
from tests.integration.raw_http import JSON, ask
from tests.integration.scraping import scrape
from tests.integration.suites import prompt, serve
from tests.tiny_models import EOS_ID, make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

PER_MINUTE = 600
LONG = 4000  # tokens: many chunks, so that one such prompt tells how fast they are computed
CROWD = 40
REJECTED = "pdserve_requests_rejected_total{{model_name=tiny,reason={}}}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def limited(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """1 router with limits that are soon met, 1 worker, 1 gateway."""
    folder = tmp_path_factory.mktemp("limited")
    part = ModelPart(make_tiny_model(folder / "tiny"), "tiny", colocated=1)
    limits = {"tenant-max-requests": 2, "tenant-tokens-per-minute": PER_MINUTE}
    async with serve(folder / "logs", part, per_worker={"router": limits}, gateways=1, metrics=True) as cluster:
        yield cluster
        await cluster.assert_all_free()


async def test_what_a_tenant_did_not_use_is_given_back(limited: Cluster) -> None:
    """The first request here, so that nothing is known of answers: its 10 + 500 tokens are taken, and 499 come back."""
    done = await limited.client.complete(prompt(10), tenant="short", max_tokens=500, logit_bias={EOS_ID: 100.0})
    assert len(done.tokens) == 1
    assert len((await limited.client.complete(prompt(400), tenant="short", max_tokens=20)).tokens) >= 1


async def refused_before_it_began(cluster: Cluster, tenant: str) -> None:
    """What a client's own gRPC needs to come back by itself: a time, and an answer of trailers alone."""
    request = inference_pb2.GenerateRequest(model="tiny", text="hi")
    async with connect(cluster.endpoint) as channel:
        call = InferenceServiceStub(channel).Generate(request, metadata=(("x-tenant-id", tenant),))
        assert not await call.initial_metadata()
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailers = dict(await call.trailing_metadata())
    assert 100 <= int(trailers[PUSHBACK_KEY]) <= 30_000


async def test_a_tenant_has_so_many_requests_and_others_have_theirs(limited: Cluster) -> None:
    client, rejected = limited.client, REJECTED.format("tenant_requests")
    before = (await scrape(limited, "router"))[rejected]
    async with AsyncExitStack() as scope:
        for seed in range(2):  # they run for as long as the window is, or until they are left
            stream = client.generate(prompt(4, seed), tenant="busy", max_tokens=280, ignore_eos=True)
            events = await scope.enter_async_context(aclosing(stream))
            assert isinstance(await anext(events), PromptInfo)
        with pytest.raises(TenantLimited, match="the tenant has 2 requests here already") as caught:
            await client.complete("hi", tenant="busy", max_tokens=1)
        assert caught.value.retry_after is not None and 0.1 <= caught.value.retry_after <= 30
        await refused_before_it_began(limited, "busy")
        for tenant in ("other", ""):
            assert len((await client.complete("hi", tenant=tenant, max_tokens=2, ignore_eos=True)).tokens) == 2
    assert (await scrape(limited, "router"))[rejected] == before + 2
    async with Client(limited.endpoint) as patient:  # the router hears a moment later that they were left
        await patient.complete("hi", tenant="busy", max_tokens=1)


async def test_a_tenant_has_so_many_tokens_a_minute(limited: Cluster) -> None:
    client = limited.client
    await client.complete(prompt(500), tenant="greedy", max_tokens=90, ignore_eos=True)
    with pytest.raises(TenantLimited, match=f"are more than is left of the tenant's {PER_MINUTE} a minute") as caught:
        await client.complete(prompt(500, 1), tenant="greedy", max_tokens=10, ignore_eos=True)
    assert caught.value.retry_after is not None and 30 < caught.value.retry_after < 60
    await client.complete(prompt(500, 2), tenant="other", max_tokens=10, ignore_eos=True)
    assert (await scrape(limited, "router"))[REJECTED.format("tenant_tokens")] >= 1


async def test_the_gateway_hands_on_whose_request_it_is(limited: Cluster) -> None:
    await limited.client.complete(prompt(500), tenant="over http", max_tokens=90, ignore_eos=True)
    url, body = f"{limited.http}/v1/completions", {"model": "tiny", "prompt": prompt(500, 1), "max_tokens": 10}
    refused = await ask(url, body, {**JSON, "x-tenant-id": "over http"})
    assert refused.status == 429 and 30 < int(refused.headers["retry-after"]) <= 60
    assert refused.error["code"] == "rate_limit_exceeded"
    assert "more than is left of the tenant's" in refused.error["message"]
    assert (await ask(url, body, {**JSON, "x-tenant-id": "someone else"})).status == 200
    for wrong in ("x" * 129, "t\u00e9"):
        invalid = await ask(url, body, {**JSON, "x-tenant-id": wrong})
        assert invalid.status == 400 and invalid.error["param"] == "x-tenant-id"


async def test_what_cannot_be_a_tenant_is_refused_with_its_name(limited: Cluster) -> None:
    """By the router, whoever asks; and by the client before it asks."""
    request = inference_pb2.GenerateRequest(model="tiny", text="hi")
    async with connect(limited.endpoint) as channel:
        call = InferenceServiceStub(channel).Generate(request, metadata=(("x-tenant-id", "x" * 129),))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await anext(aiter(call))
    error = error_from_call(raised.value)
    assert isinstance(error, InvalidRequest)
    assert (error.field, error.message) == ("x-tenant-id", "at most 128 characters, got 129")
    with pytest.raises(InvalidRequest, match="x-tenant-id: must be printable ASCII"):
        await limited.client.complete("hi", tenant="t\u00e9")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """1 router without limits, 1 prefill, 1 decode."""
    folder = tmp_path_factory.mktemp("pair")
    model = make_tiny_model(folder / "tiny", max_position_embeddings=2 * LONG)
    async with serve(folder / "logs", ModelPart(model, "tiny", prefill=1, decode=1), metrics=True) as cluster:
        yield cluster


async def crowded(cluster: Cluster, scope: AsyncExitStack) -> None:
    """Many long prompts, until the scope ends. The router has them all."""
    for seed in range(CROWD):
        stream = cluster.client.generate(prompt(LONG, 100 + seed), max_tokens=4, ignore_eos=True)
        events = await scope.enter_async_context(aclosing(stream))
        assert isinstance(await anext(events), PromptInfo)


async def test_who_would_come_too_late_is_told_so_at_once(pair: Cluster) -> None:
    client = pair.client

    async def long(seed: int, **options: Any) -> float:
        """Milliseconds to the first token."""
        done = await client.complete(prompt(LONG, seed), max_tokens=4, ignore_eos=True, **options)
        stages = done.finish.usage.stages
        return stages.queue_ms + stages.reserve_ms + stages.prefill_ms

    alone = max([await long(seed) for seed in range(3)])
    target = 4 * alone
    assert await long(3, slo_ttft_ms=target) > 0  # nobody is there, so it is let in
    async with AsyncExitStack() as scope:
        await crowded(pair, scope)
        with pytest.raises(TooLate, match="to the first token would not be kept") as caught:
            await long(4, slo_ttft_ms=target)
        assert caught.value.retry_after is not None and caught.value.retry_after >= 0.1
        with pytest.raises(TooLate, match=r"its deadline is in .* s, and the first token would come in"):
            await long(5, timeout=target / 1e3)
        # Others than those who named a target may wait, and so may who named one that it can keep.
        waits = client.generate(prompt(LONG, 6), max_tokens=4)
        hopes = client.generate(prompt(LONG, 7), max_tokens=4, slo_ttft_ms=1e6, slo_itl_ms=1e6)
        for stream in (waits, hopes):
            events = await scope.enter_async_context(aclosing(stream))
            assert isinstance(await anext(events), PromptInfo)
    found = await scrape(pair, "router")
    assert found[REJECTED.format("ttft")] == 1 and found[REJECTED.format("deadline")] == 1
    await pair.assert_all_free()


async def test_a_fresh_fleet_keeps_what_it_can_from_the_first_request_on(tmp_path: Path) -> None:
    """Workers that have just started have told how fast they are, so that the very first request is judged by it: one
    whose targets can be kept is taken in, though it comes beside others, and so is the next."""
    part = ModelPart(make_tiny_model(tmp_path / "tiny"), "tiny", prefill=1, decode=1)
    targets = {"slo-ttft-ms": 20_000, "slo-itl-ms": 10_000}  # ample, on any machine
    async with serve(tmp_path / "logs", part, per_worker={"router": targets}) as cluster:
        workers = await cluster.client.fleet()
        assert {worker.role for worker in workers} == {"prefill", "decode"}
        for worker in workers:
            known = worker.speed.knows_prompts, worker.speed.knows_answers
            assert known == (True, worker.role == "decode") and worker.computed_tokens == 0
        first = [cluster.client.complete(prompt(900, seed), max_tokens=8, ignore_eos=True) for seed in range(8)]
        for done in await asyncio.gather(*first):
            assert len(done.tokens) == 8
        await cluster.assert_all_free()
