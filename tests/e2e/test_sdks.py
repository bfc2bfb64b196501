"""Generated clients in six languages, built here and run against a live suite: all print what pdserve.client gets.

A language whose toolchain this machine lacks is skipped, with what is missing; `make sdk-toolchains` brings it.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio

from pdserve.core.errors import NoCapacity
from pdserve.launch import ModelPart
from pdserve.rpc.channel import connect
from pdserve.rpc.errors import abort
from pdserve.testing import Cluster
from pdserve.v1 import inference_pb2, inference_pb2_grpc
from scripts.sdk import LANGUAGES, CommandFailed, gather_protos, generate, missing_for_example
from tests.integration.suites import serve
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

EXAMPLES = Path(__file__).resolve().parents[2] / "sdk" / "examples"
PROMPT = """Die Brücke kostet $5 & "mehr": 100 % größer"""
MAX_TOKENS = 32  # as in the examples
DELAY = 0.3  # seconds
# What npm says where its registry is out of reach.
NO_REGISTRY = re.compile(r"ENOTFOUND|ECONNREFUSED|ECONNRESET|ETIMEDOUT|EAI_AGAIN|ENETUNREACH|ERR_SOCKET_TIMEOUT")


@pytest.fixture(scope="module", params=LANGUAGES)
def language(request: pytest.FixtureRequest) -> str:
    """A language whose client is generated and whose example is built."""
    name = str(request.param)
    if missing := missing_for_example(name):
        pytest.skip(f"no toolchain for {name} here: {', '.join(missing)}")
    began = time.monotonic()
    try:
        gather_protos()
        generate(name)
    except CommandFailed as error:
        if NO_REGISTRY.search(str(error)):
            pytest.skip(f"npm's registry is out of reach: {error}")
        raise
    generated = time.monotonic()
    done = subprocess.run(["make", "-C", EXAMPLES / name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    print(f"{name}: generated in {generated - began:.1f} s, built in {time.monotonic() - generated:.1f} s")
    return name


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A router, a prefill worker, two decode workers, a prefix cache and a gateway."""
    folder = tmp_path_factory.mktemp("sdks")
    part = ModelPart(make_tiny_model(folder / "tiny"), "tiny", prefill=1, decode=2)
    async with serve(folder, part, prefix_caches=1, gateways=1) as suite:
        yield suite


class Turnstile(inference_pb2_grpc.InferenceServiceServicer):
    """Refuses its first call as a full fleet does, and hands the others on to a router."""

    def __init__(self, router: inference_pb2_grpc.InferenceServiceAsyncStub) -> None:
        self._router = router
        self.calls: list[float] = []
        """When each came, in seconds of the loop's clock."""

    async def Generate(  # type: ignore[override]
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse],
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.calls.append(asyncio.get_running_loop().time())
        if len(self.calls) == 1:
            await abort(context, NoCapacity("all seats are taken", DELAY))
        call = self._router.Generate(request)
        try:
            async for response in call:
                yield response
        finally:
            call.cancel()


async def run(language: str, target: str, prompt: str) -> tuple[int, str, str]:
    """Run an example as its user would, and return its status, what it printed, and what it complained of."""
    settings = {"TARGET": target, "PROMPT": prompt, "PYTHON": sys.executable, "LC_ALL": "C.UTF-8"}
    process = await asyncio.create_subprocess_exec(
        *("make", "--silent", "-C", str(EXAMPLES / language), "run"),
        env={**os.environ, **settings},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        printed, complaint = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, printed.decode(), complaint.decode()


async def expected(cluster: Cluster) -> str:
    """What every example must print: text as it comes, then the token ids."""
    answer = await cluster.client.complete(PROMPT, temperature=0.0, max_tokens=MAX_TOKENS)
    assert len(answer.tokens) > 1
    return f"{answer.text}\ntokens: {' '.join(map(str, answer.token_ids))}\n"


async def test_an_example_prints_what_the_python_client_gets(language: str, cluster: Cluster) -> None:
    """The same tokens and the same text, byte for byte, and nothing stays behind."""
    status, printed, complaint = await run(language, cluster.endpoint, PROMPT)
    assert status == 0, complaint
    assert printed == await expected(cluster)
    await cluster.assert_all_free()


async def test_an_example_comes_back_when_retry_info_says(language: str, cluster: Cluster) -> None:
    """A refused call is made once more, after the delay that came with the refusal, and then answered."""
    server = grpc.aio.server()
    async with connect(cluster.endpoint) as channel:
        turnstile = Turnstile(inference_pb2_grpc.InferenceServiceStub(channel))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(turnstile, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            status, printed, complaint = await run(language, f"127.0.0.1:{port}", PROMPT)
        finally:
            await server.stop(grace=None)
    assert status == 0, complaint
    assert printed == await expected(cluster)
    first, second = turnstile.calls
    assert second - first > DELAY - 0.01  # some timers end a little early


async def test_an_example_fails_with_the_servers_words(language: str, cluster: Cluster) -> None:
    """Any other refusal ends the example with an error that says what was wrong."""
    status, _, complaint = await run(language, cluster.endpoint, "")
    assert status != 0
    assert "must not be empty" in complaint
