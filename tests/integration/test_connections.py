"""Connections that are too many, or too idle: they are closed, and those that ask for something are served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from urllib.error import HTTPError

import pytest
import pytest_asyncio

from pdserve.client import NO_RETRIES, Client
from pdserve.core.errors import Unavailable
from pdserve.launch import ModelPart
from pdserve.testing import Cluster
from tests.integration.idlers import Idler, idling
from tests.integration.raw_http import opened
from tests.integration.suites import complete_over_http, prompt, serve
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

MOST = 20
SOON = 30.0  # seconds; enough on any machine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def narrow(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A router and a gateway that take few connections, and none that idles for a second."""
    folder = tmp_path_factory.mktemp("narrow")
    part = ModelPart(make_tiny_model(folder / "tiny"), "tiny", colocated=1)
    limits = {"max-connections": MOST, "idle-seconds": 1}
    per_worker = {"router": limits, "gateway-0": limits}
    async with serve(folder / "logs", part, gateways=1, per_worker=per_worker) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def patient(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """As `narrow`, but connections may idle."""
    folder = tmp_path_factory.mktemp("patient")
    part = ModelPart(make_tiny_model(folder / "tiny"), "tiny", colocated=1)
    limits = {"max-connections": MOST}
    per_worker = {"router": limits, "gateway-0": limits}
    async with serve(folder / "logs", part, gateways=1, per_worker=per_worker) as cluster:
        yield cluster


def still_open(idlers: list[Idler]) -> int:
    return sum(not idler.closed.done() for idler in idlers)


async def test_a_router_closes_what_is_too_many_and_serves_who_is_there(patient: Cluster) -> None:
    await patient.client.complete(prompt(8), max_tokens=2)
    await complete_over_http(patient, prompt(8), 2)
    async with idling(patient.endpoint, 2 * MOST, http2=True) as idlers:
        assert 0 < still_open(idlers) < MOST
        await patient.client.complete(prompt(8, 1), max_tokens=2)
        await complete_over_http(patient, prompt(8, 1), 2)  # the gateway has its stream already
        async with Client(patient.endpoint, retry=NO_RETRIES) as newcomer:
            with pytest.raises(Unavailable):
                await newcomer.complete(prompt(8, 2), max_tokens=2)
    async with Client(patient.endpoint, wait_for_ready=True) as newcomer:
        await newcomer.complete(prompt(8, 3), max_tokens=2, timeout=SOON)


async def test_a_gateway_tells_who_is_too_many_to_come_back(patient: Cluster) -> None:
    """And once in its log, however many they are."""
    endpoint = patient.suite.gateways[0].endpoint
    async with idling(endpoint, MOST, http2=False) as idlers:
        async with opened(f"{patient.http}/health") as (reader, _), asyncio.timeout(SOON):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ") and b"\r\nretry-after: 1\r\n" in head
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        with pytest.raises(HTTPError, match="503"):
            await complete_over_http(patient, prompt(8), 2)
        assert still_open(idlers) == MOST, "who was there first stays"
        idlers[0].transport.abort()
        await idlers[0].closed
        await served_at_last(patient)
    said = [line for line in patient.suite.gateways[0].log_tail(200) if "too_many_connections" in line]
    assert len(said) == 1 and f'"max_connections": {MOST}' in said[0]


async def served_at_last(cluster: Cluster) -> None:
    """The other side hears of a close a moment later, and says nothing; so ask until there is room."""
    async with asyncio.timeout(SOON):
        while True:
            try:
                return await complete_over_http(cluster, prompt(8), 2)
            except (HTTPError, ConnectionError):
                continue


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n", id="half a head"),
        pytest.param(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n", id="a whole request"),
        pytest.param(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\nGET /version HTTP/1.1\r\nhost", id="one and a half"),
    ],
)
async def test_a_gateway_closes_what_idles(narrow: Cluster, said: bytes) -> None:
    """Whatever it said before; what it asked for is answered."""
    async with idling(narrow.suite.gateways[0].endpoint, 1, http2=False) as (idler,), asyncio.timeout(SOON):
        idler.transport.write(said)
        await idler.closed
        assert idler.received.count(b"HTTP/1.1 200 OK") == said.count(b"\r\n\r\n")


async def test_a_router_closes_what_idles_and_clients_do_not_notice(narrow: Cluster) -> None:
    await narrow.client.complete(prompt(8), max_tokens=2)
    async with idling(narrow.endpoint, 1, http2=True) as (idler,), asyncio.timeout(SOON):
        await idler.closed
    await narrow.client.complete(prompt(8, 1), max_tokens=2)
