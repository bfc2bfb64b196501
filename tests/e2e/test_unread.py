"""Clients that ask for long answers and read nothing, beside some that do."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from benchmarks.processes import resident_bytes
from pdserve.client import Client
from pdserve.launch import Service
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1.inference_pb2_grpc import InferenceServiceStub
from tests.integration.raw_http import JSON, opened
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow

READERS, SILENT, TOKENS, LONG = 60, 20, 1500, 4000
UNREAD = 3.0  # seconds until who reads nothing is left
# Bytes of the router for a token that nobody reads. One that kept its step's message would take ten times that.
EACH = 1 << 10
BESIDES = 8 << 20  # bytes: what a router takes while it warms up
# As small a window as a client may have: what is sent waits in the router, not in the system.
WINDOW = [("grpc.http2.lookahead_bytes", 64), ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]


@asynccontextmanager
async def suite(folder: Path) -> AsyncIterator[tuple[Service, Service]]:
    """A router and a gateway in front of answers without a model, of any number, a token of each in every step."""
    model = make_tiny_model(folder / "model")
    source = Path(__file__).parents[2] / "benchmarks" / "token_source.py"
    async with AsyncExitStack() as scope:
        pipe = subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, str(source), stdin=pipe, stdout=pipe)
        scope.push_async_callback(process.communicate, b"")
        assert process.stdout is not None
        endpoint = (await process.stdout.readline()).decode().strip()

        async def start(module: str, *flags: str) -> Service:
            limits = ("--port", "0", "--unread-seconds", str(UNREAD), "--log-level", "warning")
            service = await Service.start(module, module, (*flags, *limits), log_folder=folder, listener=lambda _: None)

            async def end() -> None:
                service.kill()
                await service.close()

            scope.push_async_callback(end)
            await service.ready()
            return service

        router = await start("router", "--worker", endpoint, "--model", f"tiny={model}")
        yield router, await start("gateway", "--router", router.endpoint)


def request(tokens: int) -> pb.GenerateRequest:
    stopping = pb.StoppingOptions(max_tokens=tokens, ignore_eos=True)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), stopping=stopping)


async def read_at_last(call: Any) -> int:
    """How many tokens there are of an answer that was ended."""
    tokens = 0
    with pytest.raises(grpc.aio.AioRpcError):
        async for response in call:
            tokens += len(response.output.tokens)
    return tokens


async def test_who_reads_nothing_costs_little_holds_nobody_up_and_is_left(tmp_path: Path) -> None:
    async with suite(tmp_path) as (router, _), Client(router.endpoint) as client:
        await client.complete([1, 2, 3], max_tokens=4, ignore_eos=True)
        before = resident_bytes(router.pid)
        async with grpc.aio.insecure_channel(router.endpoint, options=WINDOW) as channel:
            stub = InferenceServiceStub(channel)
            silent = [stub.Generate(request(TOKENS)) for _ in range(SILENT)]
            reading = [client.complete([1, 2, 3], max_tokens=TOKENS, ignore_eos=True) for _ in range(READERS)]
            answers = await asyncio.gather(*reading)
            grown = resident_bytes(router.pid) - before
            assert all(len(answer.tokens) == TOKENS for answer in answers)
            async with asyncio.timeout(60):
                came = await asyncio.gather(*map(read_at_last, silent))
        assert max(came) < TOKENS, "none of them is whole"
        print(
            f"the router grew by {grown >> 20} MiB, {grown // (SILENT * TOKENS)} bytes for each token that was not read"
        )
        assert grown < EACH * TOKENS * SILENT + BESIDES
        await client.complete([1, 2, 3], max_tokens=4, ignore_eos=True)


async def test_a_gateway_leaves_who_reads_nothing(tmp_path: Path) -> None:
    async with suite(tmp_path) as (router, gateway), AsyncExitStack() as scope:
        url = f"http://{gateway.endpoint}/v1/completions"
        before = {service.name: resident_bytes(service.pid) for service in (router, gateway)}
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": LONG, "ignore_eos": True, "stream": True}
        ends = [await scope.enter_async_context(opened(url, body, JSON)) for _ in range(SILENT)]
        for reader, _ in ends:
            reader._transport.pause_reading()  # type: ignore[attr-defined]
        async with Client(router.endpoint) as client:
            await client.complete([1, 2, 3], max_tokens=LONG, ignore_eos=True)
        for service in (router, gateway):
            grown = resident_bytes(service.pid) - before[service.name]
            print(f"the {service.name} grew by {grown >> 20} MiB")
            assert grown < EACH * LONG * SILENT + BESIDES
