"""A router that asks for API keys, and a gateway that hands on what its callers show, with real services."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import openai
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client import NO_RETRIES, Client, Finish, Output, Session, SyncClient
from pdserve.core.errors import InvalidRequest, PermissionDenied, TenantLimited, Unauthenticated, UnknownRequest
from pdserve.launch import ModelPart
from pdserve.rpc.api_keys import AUTHORIZATION, bearer, new_key
from pdserve.rpc.channel import connect
from pdserve.testing import Cluster
from pdserve.v1 import inference_pb2
from tests.integration.scraping import scrape
from tests.integration.suites import LONG_ENOUGH, LONG_MODEL, prompt, serve
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
SHORT: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
TOLD = "the cat sat on a confidential mat"  # what no log may repeat

KEYS = {
    "alice": {"models": ["tiny"]},
    "bob": {"tenant": "team"},
    "one": {"max_requests": 1},
    "poor": {"tokens_per_minute": 60},
    "boss": {"admin": True},
}


class Keys:
    """A file of keys, and what each is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        made = {name: new_key(name, **fields) for name, fields in KEYS.items()}  # type: ignore[arg-type]
        self.of = {name: key for name, (key, _) in made.items()}
        self.entries = {name: entry for name, (_, entry) in made.items()}
        self.write(*self.entries.values())

    def write(self, *entries: str) -> None:
        self.path.write_text("keys:\n" + "".join(entries))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys") / "keys.yaml")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Two models, a worker each, and a gateway."""
    folder = tmp_path_factory.mktemp("suite")
    model = make_tiny_model(folder / "model", **LONG_MODEL)
    parts = [ModelPart(model, name, colocated=1) for name in ("tiny", "other")]
    flags = {"router": {"api-keys-file": keys.path}}
    async with serve(folder / "logs", *parts, gateways=1, per_worker=flags, metrics=True, log_level="debug") as made:
        yield made


def client_of(cluster: Cluster, key: str) -> Client:
    return Client(cluster.endpoint, api_key=key, retry=NO_RETRIES)


@pytest.mark.parametrize("shown", [(), bearer("pds-nobodys"), ((AUTHORIZATION, "Basic YTpi"),)])
async def test_a_stranger_is_refused_on_every_public_rpc(cluster: Cluster, shown: tuple[tuple[str, str], ...]) -> None:
    """Whatever the schema knows; the stream for many asks each of its requests instead, as below."""
    methods = [method.name for method in SERVICE.methods if method.name != "Multiplex"]
    assert {"Generate", "ListModels", "GetStats", "GetFleet", "ListTraces", "GetDecisions"} <= set(methods)
    async with connect(cluster.endpoint) as channel:
        for path in (*(f"/{SERVICE.full_name}/{name}" for name in methods), REFLECTION, "/nobody.knows/This"):
            call: Any = channel.stream_stream(path)(timeout=10, metadata=shown)
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED, path
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_key_opens_what_it_is_for(cluster: Cluster, keys: Keys) -> None:
    async with client_of(cluster, keys.of["alice"]) as alice, client_of(cluster, keys.of["bob"]) as bob:
        assert len((await alice.complete(TOLD, **SHORT)).token_ids) == 4
        assert [model.name for model in await alice.models()] == ["tiny"]
        assert sorted(model.name for model in await bob.models()) == ["other", "tiny"]
        assert {worker.model for worker in await alice.fleet()} == {"tiny"}
        assert [model.model for model in (await alice.stats()).models] == ["tiny"]
        assert (await alice.complete("hi", **{**SHORT, "model": ""})).finish.usage.completion_tokens == 4
        assert (await alice.tokenize("hi")).ids == (await bob.tokenize("hi", model="tiny")).ids
        for refused in (
            alice.complete("hi", **{**SHORT, "model": "other"}),
            alice.tokenize("hi", model="other"),
            alice.detokenize([1], model="nothing"),
        ):
            with pytest.raises(PermissionDenied, match=r"'(other|nothing)'"):
                await refused


async def test_the_sync_client_and_the_view_for_somebody_else_show_keys_too(cluster: Cluster, keys: Keys) -> None:
    def ask() -> int:
        with SyncClient(cluster.endpoint, api_key=keys.of["alice"]) as client:
            assert [model.name for model in client.models()] == ["tiny"]
            return len(client.complete("hi", **SHORT).token_ids)

    assert await asyncio.to_thread(ask) == 4
    async with client_of(cluster, "") as nobody:
        with pytest.raises(Unauthenticated):
            await nobody.complete("hi", **SHORT)
        assert len((await nobody.complete("hi", **SHORT, api_key=keys.of["bob"])).token_ids) == 4
        assert len(await nobody.with_api_key(keys.of["bob"]).models()) == 2
        with pytest.raises(Unauthenticated):
            await nobody.models()
        with pytest.raises(InvalidRequest, match="api_key"):
            nobody.with_api_key("two words")


async def test_requests_are_of_the_key_s_tenant_and_others_are_not_told_of_them(cluster: Cluster, keys: Keys) -> None:
    async with (
        client_of(cluster, keys.of["alice"]) as alice,
        client_of(cluster, keys.of["bob"]) as bob,
        client_of(cluster, keys.of["boss"]) as boss,
    ):
        await alice.complete("hi", **SHORT, request_id="hers", tenant="alice")
        await boss.complete("hi", **SHORT, request_id="for-team", tenant="team")
        with pytest.raises(PermissionDenied, match="x-tenant-id"):
            await bob.complete("hi", **SHORT, tenant="alice")
        assert "hers" not in {one.request_id for one in await bob.traces(100)}
        for ask in (bob.trace, bob.explain):
            with pytest.raises(UnknownRequest):
                await ask("hers")
        assert "for-team" in {one.request_id for one in await bob.traces(100)}
        for who in (alice, boss):
            assert (await who.trace("hers")).request.request_id == "hers"
            assert (await who.explain("hers")).request.request_id == "hers"


async def test_a_key_has_limits_of_its_own(cluster: Cluster, keys: Keys) -> None:
    async with client_of(cluster, keys.of["one"]) as one, client_of(cluster, keys.of["poor"]) as poor:
        async with one.generate(prompt(8), **{**SHORT, "max_tokens": LONG_ENOUGH}) as events:
            await anext(events)
            with pytest.raises(TenantLimited, match="the key has 1 requests"):
                await one.complete("hi", **SHORT)
        await poor.complete(prompt(40), **SHORT)
        with pytest.raises(TenantLimited, match="the key's 60 a minute") as refused:
            await poor.complete(prompt(40), **SHORT)
        assert refused.value.retry_after is not None and refused.value.retry_after > 0
    await cluster.assert_all_free()


async def test_two_tenants_and_a_stranger_on_one_stream(cluster: Cluster, keys: Keys) -> None:
    """Each request of a stream shows its own key. Who shows none is refused alone."""

    async def ask(session: Session, who: str, **options: Any) -> str:
        async with session.generate("hi", **{**SHORT, **options}, api_key=keys.of.get(who, "")) as events:
            return [type(event) async for event in events][-1].__name__

    async with Session(cluster.endpoint) as session:
        found = await asyncio.gather(
            ask(session, "alice", request_id="mux-a"),
            ask(session, "bob", request_id="mux-b", model="other"),
            ask(session, "nobody"),
            ask(session, "alice", model="other"),
            ask(session, "alice", tenant="team"),
            return_exceptions=True,
        )
        assert found[:2] == ["Finish", "Finish"]
        assert [type(error) for error in found[2:]] == [Unauthenticated, PermissionDenied, PermissionDenied]
        assert await ask(session, "bob") == "Finish"
    async with client_of(cluster, keys.of["bob"]) as bob:
        seen = {one.request_id for one in await bob.traces(100)}
        assert "mux-b" in seen and "mux-a" not in seen
    async with (
        Session(cluster.endpoint, api_key=keys.of["alice"]) as session,
        session.generate("hi", **SHORT) as events,
    ):
        assert [type(event) async for event in events][-1] is Finish


async def test_a_file_that_changes_holds_from_the_next_call_on(cluster: Cluster, keys: Keys) -> None:
    """Revoked keys are refused, running answers end, new keys work, and a file that is none changes nothing."""
    new, entry = new_key("new")
    others = [text for name, text in keys.entries.items() if name != "bob"]
    async with client_of(cluster, keys.of["bob"]) as bob, client_of(cluster, new) as newcomer:
        try:
            async with bob.generate(prompt(8), **{**SHORT, "max_tokens": 400}) as events:
                await anext(events)
                keys.write(*others, entry)
                with pytest.raises(Unauthenticated):
                    await bob.models()
                assert len(await newcomer.models()) == 2
                assert isinstance([event async for event in events][-1], Finish)
            keys.path.write_text("keys: [")
            assert len(await newcomer.models()) == 2
            assert (await scrape(cluster, "router"))["pdserve_api_keys_unreadable_total"] == 1
        finally:
            keys.write(*keys.entries.values())
        assert len(await bob.models()) == 2


async def test_openai_s_client_at_the_gateway(cluster: Cluster, keys: Keys) -> None:
    def gpt(key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{cluster.http}/v1", api_key=key, max_retries=0)

    messages: Any = [{"role": "user", "content": TOLD}]
    async with gpt(keys.of["alice"]) as alice, gpt("pds-nobodys") as nobody, gpt(keys.of["poor"]) as poor:
        answer = await alice.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
        assert answer.usage is not None and answer.usage.completion_tokens <= 4
        assert [model.id async for model in await alice.models.list()] == ["tiny"]
        for stream in (False, True):
            with pytest.raises(openai.AuthenticationError) as unknown:
                await nobody.chat.completions.create(model="tiny", messages=messages, stream=stream)
            assert (unknown.value.status_code, unknown.value.code) == (401, "invalid_api_key")
            assert unknown.value.response.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError):
            await nobody.models.list()
        with pytest.raises(openai.PermissionDeniedError, match="'other'"):
            await alice.completions.create(model="other", prompt=["a", "b"])
        with pytest.raises(openai.RateLimitError) as limited:
            await poor.completions.create(model="tiny", prompt="x" * 100, max_tokens=100)
            await poor.completions.create(model="tiny", prompt="x" * 100, max_tokens=100)
        assert limited.value.code == "rate_limit_exceeded"


@pytest.mark.parametrize(("who", "status", "says"), [("alice", 0, '"model": "tiny"'), ("", 1, "no API key")])
async def test_commands_take_the_key_from_a_variable(
    cluster: Cluster, keys: Keys, who: str, status: int, says: str
) -> None:
    words = ("status", "--json", "--target", cluster.endpoint)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdserve.cli", *words),
        env={**os.environ, "PDSERVE_API_KEY": keys.of.get(who, "")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == status and says in out.decode() and "other" not in out.decode()


async def test_the_page_and_its_data(cluster: Cluster, keys: Keys) -> None:
    """The page itself and probes are for everybody; what it shows is for who has a key, and no more than that one's."""

    def get(path: str, key: str = "") -> tuple[int, Any]:
        request = urllib.request.Request(cluster.http + path, headers={"authorization": f"Bearer {key}"} if key else {})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    for path in ("/", "/health", "/version"):
        assert (await asyncio.to_thread(get, path))[0] == 200, path
    for path in ("/pdserve/v1/fleet", "/pdserve/v1/stats", "/pdserve/v1/traces", "/pdserve/v1/trace/x", "/v1/models"):
        assert (await asyncio.to_thread(get, path))[0] == 401, path
    status, body = await asyncio.to_thread(get, "/pdserve/v1/traces", keys.of["alice"])
    assert status == 200
    models = {one["model"] for one in json.loads(body)["requests"]}
    assert models == {"tiny"}


async def test_no_key_no_digest_and_no_prompt_stands_in_a_log(cluster: Cluster, keys: Keys) -> None:
    """After all of the above, at the level that tells most; last of this module."""
    async with client_of(cluster, keys.of["alice"]) as alice:
        said = [event async for event in alice.generate(TOLD, **{**SHORT, "max_tokens": 40})]
        answer = "".join(event.text for event in said if isinstance(event, Output))
    logs = {one.name: "\n".join(one.log_tail(1_000_000)) for one in cluster.suite.services}
    assert all(logs.values())
    for name, log in logs.items():
        for secret in (*keys.of.values(), "pds-", "confidential", answer):
            assert secret not in log, name
