"""vLLM's own disaggregation as one server: a prefill and a decode engine, a share of the cores each, behind one port.

    .venv/bin/python benchmarks/peer_pair.py --venv build/peer --model FOLDER --port 8100 -- vllm serve options

KV goes from engine to engine by its NixlConnector, over TCP. What stands before them does what that connector's users
write: a completion is first asked of the prefill engine, for one token and `do_remote_decode`; the `kv_transfer_params`
that it answers with go with the request to the decode engine, whose stream is the answer. GET /health answers 200 once
both engines have answered something: a decode engine must not begin with blocks from elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

CONNECTOR = '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}'
ASKED = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")  # of the prefill engine, to be filled in
WARM = {"model": "peer", "prompt": [5] * 64, "max_tokens": 4}
EVERY = 1.0  # seconds between two questions whether an engine is up


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Engine:
    """One vLLM on `cores` ("0-3"), as a subprocess."""

    def __init__(self, venv: Path, model: str, cores: str, options: list[str]) -> None:
        port = free_port()
        self.base = f"http://127.0.0.1:{port}"
        command = [str(venv / "bin" / "vllm"), "serve", model, "--port", str(port), "--kv-transfer-config", CONNECTOR]
        environment = {
            "UCX_TLS": "tcp",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "VLLM_CPU_OMP_THREADS_BIND": cores,
        }
        self.process = subprocess.Popen([*command, *options], env=os.environ | environment)

    async def warm(self, client: httpx2.AsyncClient) -> None:
        """Until it has answered something."""
        while True:
            if self.process.poll() is not None:
                raise SystemExit(f"an engine ended with {self.process.returncode}")
            with contextlib.suppress(httpx2.TransportError):
                if (await client.get(f"{self.base}/health")).status_code == 200:
                    break
            await asyncio.sleep(EVERY)
        (await client.post(f"{self.base}/v1/completions", json=WARM)).raise_for_status()


class Pair:
    """The two engines as one."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self._prefill, self._decode = prefill, decode
        self._client = httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=None))
        self._warm = asyncio.Event()

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with self._client, asyncio.TaskGroup() as group:
            warming = group.create_task(self._warm_up())
            yield
            warming.cancel()

    async def health(self, _: Request) -> Response:
        return Response(status_code=200 if self._warm.is_set() else 503)

    async def models(self, _: Request) -> Response:
        return JSONResponse((await self._client.get(f"{self._decode.base}/v1/models")).json())

    async def completions(self, request: Request) -> Response:
        asked = await request.json()
        transfer = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(ASKED)}
        first = {**asked, "stream": False, "max_tokens": 1, "kv_transfer_params": transfer}
        for name in ("stream_options", "min_tokens"):  # which a single token cannot have
            first.pop(name, None)
        prefilled = await self._client.post(f"{self._prefill.base}/v1/completions", json=first)
        if prefilled.status_code != 200:
            return Response(prefilled.content, prefilled.status_code, media_type="application/json")
        then = {**asked, "kv_transfer_params": prefilled.json()["kv_transfer_params"]}
        call = self._client.build_request("POST", f"{self._decode.base}/v1/completions", json=then)
        answer = await self._client.send(call, stream=True)
        kind = answer.headers.get("content-type")
        return StreamingResponse(_parts(answer), answer.status_code, media_type=kind)

    async def _warm_up(self) -> None:
        await asyncio.gather(self._prefill.warm(self._client), self._decode.warm(self._client))
        self._warm.set()


async def _parts(answer: httpx2.Response) -> AsyncIterator[bytes]:
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await answer.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, required=True, help="where scripts/peer.py has installed vLLM")
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("options", nargs="*", help="of both engines")
    args = parser.parse_args()
    # uvicorn takes the signal first, and raises it again when it has ended.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    cores = os.cpu_count() or 1
    half = max(1, cores // 2)
    places = (f"0-{half - 1}", f"{min(half, cores - 1)}-{cores - 1}")
    engines: list[Engine] = []
    try:
        for place in places:
            engines.append(Engine(args.venv, args.model, place, args.options))
        pair = Pair(*engines)
        routes = [
            Route("/health", pair.health),
            Route("/v1/models", pair.models),
            Route("/v1/completions", pair.completions, methods=["POST"]),
        ]
        app = Starlette(routes=routes, lifespan=pair.lifespan)
        uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning")
    finally:
        for engine in engines:
            engine.process.terminate()
        for engine in engines:
            engine.process.wait()


if __name__ == "__main__":
    main()
