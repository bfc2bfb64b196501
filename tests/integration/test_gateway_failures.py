"""What a gateway's clients see when something goes wrong, and that nothing of theirs stays behind."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.client import Client
from pdserve.launch import ModelPart, Service
from pdserve.testing import Cluster
from tests.integration.extra_service import service
from tests.integration.raw_http import ask, opened
from tests.integration.suites import prompt, serve
from tests.tiny_models import make_tiny_model

LONG: dict[str, Any] = {"prompt": prompt(20), "max_tokens": 6000, "temperature": 0, "ignore_eos": True}
SHORT: dict[str, Any] = {"prompt": prompt(20, 1), "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=8192)


def suite(logs: Path, model: Path, *, colocated: int = 1, **per_worker: dict[str, object]) -> Cluster:
    flags = {name.replace("_", "-"): value for name, value in per_worker.items()}
    return serve(logs, ModelPart(model, "tiny", colocated=colocated), gateways=1, per_worker=flags)


def client_of(url: str, max_retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=max_retries)


def extra(options: dict[str, Any]) -> dict[str, Any]:
    """Options as the client wants them: vLLM's in extra_body."""
    known = {name: value for name, value in options.items() if name != "ignore_eos"}
    return {"model": "tiny", **known, "extra_body": {"ignore_eos": options.get("ignore_eos")}}


async def metric(url: str, name: str, **labels: str) -> float:
    """Sum of a metric over the series that have these labels."""
    families = text_string_to_metric_families((await ask(f"{url}/metrics")).body.decode())
    samples = (sample for family in families for sample in family.samples if sample.name == name)
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


async def refusals(url: str) -> float:
    return await metric(url, "pdserve_gateway_requests_total", status="429")


@asynccontextmanager
async def streaming(url: str, **options: Any) -> AsyncIterator[asyncio.StreamReader]:
    """A streamed answer that has begun."""
    async with opened(f"{url}/v1/completions", {**options, "stream": True}) as (reader, _):
        async with asyncio.timeout(60):
            await reader.readuntil(b"data: ")
        yield reader


async def test_a_full_fleet_is_a_429_that_clients_come_back_from(tmp_path: Path, model: Path) -> None:
    """One seat and one place in the queue: the third is refused with the time to wait, and its client retries."""
    flags: dict[str, dict[str, object]] = {"decode_0": {"max-num-seqs": 1}, "router": {"max-queue": 1}}
    async with suite(tmp_path, model, **flags) as cluster, client_of(cluster.http) as once:
        async with streaming(cluster.http, **LONG):
            waiting = asyncio.create_task(ask(f"{cluster.http}/v1/completions", SHORT))
            refused = None
            while refused is None:  # until the one before has its place in the queue
                try:
                    async with asyncio.timeout(1):
                        await once.completions.create(**extra(SHORT))
                except openai.RateLimitError as error:
                    refused = error
                except TimeoutError:
                    continue
            assert (refused.code, refused.type) == ("no_capacity", "rate_limit_error")
            assert int(refused.response.headers["retry-after"]) >= 1
            assert int(refused.response.headers["retry-after-ms"]) >= 100
            streamed = await ask(f"{cluster.http}/v1/completions", {**SHORT, "stream": True})
            assert (streamed.status, streamed.error["code"]) == (429, "no_capacity")
            patient = client_of(cluster.http, max_retries=50)
            retried = asyncio.create_task(patient.completions.create(**extra(SHORT)))
            before = await refusals(cluster.http)
            async with asyncio.timeout(60):
                while await refusals(cluster.http) < before + 2:  # it was refused, and came back
                    pass
        # The one with the seat is gone: the one in the queue takes it, and then there is a place for a third.
        async with patient:
            answer = await asyncio.wait_for(retried, 120)
        assert answer.usage is not None and answer.usage.completion_tokens == 4
        assert (await waiting).status == 200
        await cluster.assert_all_free()


async def test_a_lost_router_ends_a_stream_with_an_error(tmp_path: Path, model: Path) -> None:
    """Mid-stream there is no status any more: the last event says it, [DONE] does not come, the client raises."""
    async with suite(tmp_path, model) as cluster, client_of(cluster.http) as client:
        assert cluster.suite.router is not None
        stream = await client.completions.create(**extra(LONG), stream=True)
        raw = asyncio.create_task(ask(f"{cluster.http}/v1/completions", {**LONG, "stream": True}))
        received = 0
        with pytest.raises(openai.APIError) as error:
            async for _ in stream:
                received += 1
                if received == 3:
                    cluster.suite.router.kill()
        assert received >= 3
        assert (error.value.code, error.value.type) == ("unavailable", "server_error")
        reply = await raw
        if reply.status == 200:
            assert reply.events[-1]["error"]["code"] == "unavailable" and b"[DONE]" not in reply.body
        await cluster.suite.router.exited
        assert (await ask(f"{cluster.http}/health")).status == 503
        for stream_it in (False, True):
            refused = await ask(f"{cluster.http}/v1/completions", {**SHORT, "stream": stream_it})
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert refused.error["type"] == "server_error"
        with pytest.raises(openai.InternalServerError):
            await client.models.list()
        assert await metric(cluster.http, "pdserve_gateway_stream_errors_total") >= 1
        await cluster.assert_all_free()


async def test_a_lost_fleet_ends_a_stream_at_its_deadline(tmp_path: Path, model: Path) -> None:
    """The only decode worker dies: the router waits for another, until the gateway's limit for an answer."""
    async with suite(tmp_path, model, gateway_0={"max-request-seconds": 3}) as cluster:
        async with streaming(cluster.http, **LONG) as reader:
            await cluster.kill("decode-0")
            rest = await asyncio.wait_for(reader.read(), 60)
        assert b'"error"' in rest and b"[DONE]" not in rest
        assert b'"code":"no_capacity"' in rest or b'"code":"timeout"' in rest
        refused = await ask(f"{cluster.http}/v1/completions", SHORT)
        assert refused.status in (429, 504)
        assert (await ask(f"{cluster.http}/health")).status == 503


async def test_clients_that_go_away_cancel_their_requests(tmp_path: Path, model: Path) -> None:
    """30 requests, a third dropped at random moments, streamed and whole: the others are right, no block stays."""
    chance = random.Random(11)
    async with suite(tmp_path, model, colocated=2) as cluster:
        url = f"{cluster.http}/v1/completions"
        expected = (await ask(url, {**SHORT, "max_tokens": 40})).json["choices"][0]["text"]

        async def one(index: int) -> None:
            if index % 3:
                reply = await ask(url, {**SHORT, "max_tokens": 40})
                assert reply.json["choices"][0]["text"] == expected
                return
            prompts = [prompt(20, index), prompt(20, index + 1)] if index % 2 else prompt(20, index)
            body = {**LONG, "prompt": prompts, "stream": index % 4 < 2}
            async with opened(url, body) as (reader, _):
                try:
                    async with asyncio.timeout(chance.random()):
                        while await reader.read(1 << 16):
                            pass
                except TimeoutError:
                    return  # `opened` closes the connection
            raise AssertionError("it was over before it was dropped")

        await asyncio.gather(*map(one, range(30)))
        await cluster.assert_all_free()
        assert sum(worker.outstanding_tokens for worker in await cluster.client.fleet()) == 0
        assert await metric(cluster.http, "pdserve_gateway_disconnects_total") == 10
        assert await metric(cluster.http, "pdserve_gateway_requests_in_flight") == 1  # this one


async def test_the_openai_client_cancels_when_its_stream_is_left(tmp_path: Path, model: Path) -> None:
    async with suite(tmp_path, model) as cluster, client_of(cluster.http) as client:
        async with await client.completions.create(**extra(LONG), stream=True) as stream:
            async for _ in stream:
                break
        await cluster.assert_all_free()


async def test_a_gateway_that_is_told_to_stop_lets_answers_end(tmp_path: Path, model: Path) -> None:
    """SIGTERM: the running stream is whole, new connections are refused, the exit status is 0."""
    async with suite(tmp_path, model) as cluster:
        flags = ("--router", cluster.endpoint, "--port", "0")
        async with service("gateway", *flags, logs=tmp_path) as gateway:
            url = f"http://{gateway.endpoint}"
            async with streaming(url, **{**LONG, "max_tokens": 300}) as reader:
                gateway.terminate()
                rest = await asyncio.wait_for(reader.read(), 60)
            assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert await asyncio.wait_for(gateway.exited, 60) == 0
            with pytest.raises(ConnectionError):
                await ask(f"{url}/health")
        await cluster.assert_all_free()


@pytest.mark.parametrize("how", ["second signal", "drain time"])
async def test_a_gateway_that_must_stop_cancels_what_runs(tmp_path: Path, model: Path, how: str) -> None:
    async with suite(tmp_path, model) as cluster:
        seconds = "60" if how == "second signal" else "0.2"
        flags = ("--router", cluster.endpoint, "--port", "0", "--drain-seconds", seconds)
        async with service("gateway", *flags, logs=tmp_path) as gateway:
            async with streaming(f"http://{gateway.endpoint}", **LONG) as reader:
                gateway.terminate()
                if how == "second signal":
                    await _draining(gateway)
                    gateway.terminate()
                assert b"[DONE]" not in await asyncio.wait_for(reader.read(), 60)
            assert await asyncio.wait_for(gateway.exited, 60) == 0
        await cluster.assert_all_free()


async def _draining(gateway: Service) -> None:
    """Wait until it takes no more connections: then it has seen its first signal."""
    host, port = gateway.endpoint.split(":")
    async with asyncio.timeout(30):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionError:
                return
            writer.close()


async def test_two_routers(tmp_path: Path, model: Path) -> None:
    """A gateway with several routers uses both, and goes on with the one that is left."""
    async with suite(tmp_path, model) as cluster:
        inside = ("--worker", cluster.workers["decode-0"].endpoint)
        inside += ("--internal-secret-file", str(cluster.suite.internal_secret_file))
        async with service("router", "--model", f"tiny={model}", *inside, logs=tmp_path) as second:
            flags = ("--router", cluster.endpoint, "--router", second.endpoint, "--port", "0")
            async with service("gateway", *flags, logs=tmp_path) as gateway:
                url = f"http://{gateway.endpoint}"
                async with Client(second.endpoint) as other, asyncio.timeout(60):
                    # It is ready as soon as one of them serves, and hears of the other a moment later.
                    while not (await cluster.client.traces(1) and await other.traces(1)):
                        replies = await asyncio.gather(*(ask(f"{url}/v1/completions", SHORT) for _ in range(8)))
                        assert [reply.status for reply in replies] == [200] * 8
                second.kill()
                await second.exited
                assert (await ask(f"{url}/health")).status == 200
                statuses = [(await ask(f"{url}/v1/completions", SHORT)).status for _ in range(4)]
                assert statuses == [200] * 4


async def test_what_cannot_be_listened_on_is_one_line(tmp_path: Path, model: Path) -> None:
    async with service("gateway", "--router", "127.0.0.1:1", "--port", "0", logs=tmp_path, ready=False) as first:
        assert (await ask(f"http://{first.endpoint}/health")).status == 503
        port = first.endpoint.split(":")[1]
        second = await Service.start(
            "gateway", "second", ["--port", port], log_folder=tmp_path, listener=lambda event: None
        )
        assert await asyncio.wait_for(second.exited, 60) == 1
        await second.close()
        assert second.error == f"cannot listen on 127.0.0.1:{port}: Address already in use"
        first._signal(signal.SIGINT)
        assert await asyncio.wait_for(first.exited, 60) == 0
