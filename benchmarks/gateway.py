"""What of the gRPC API's tokens/s does the gateway keep?

The same suite (router, gateway, one worker with a tiny model, so that the engine is not the only bottleneck) answers
the same streams over gRPC and over HTTP, in turn, on the same cores. The clients are processes of their own and as
cheap as they can be: a bare stub, and a bare socket that counts what comes. CPU time by token is told beside the rate:
it says where the time goes, also on a machine that others use.

usage: python benchmarks/gateway.py [--streams N] [--tokens N] [--rounds N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPT = list(range(1, 33))


async def over_grpc(target: str, streams: int, tokens: int) -> int:
    """Tokens that came."""
    from pdserve.rpc.channel import connect
    from pdserve.v1 import inference_pb2 as pb
    from pdserve.v1.inference_pb2_grpc import InferenceServiceStub

    async with connect(target) as channel:
        stub = InferenceServiceStub(channel)

        async def one(seed: int) -> int:
            request = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=PROMPT),
                sampling=pb.SamplingOptions(temperature=1.0, seed=seed),
                stopping=pb.StoppingOptions(max_tokens=tokens, ignore_eos=True),
            )
            received = 0
            async for response in stub.Generate(request):
                received += len(response.output.tokens)
            return received

        return sum(await asyncio.gather(*map(one, range(streams))))


async def over_http(target: str, streams: int, tokens: int) -> int:
    """Tokens that came, as the usage at the end of each stream counts them."""
    host, port = target.rsplit(":", 1)

    async def one(seed: int) -> int:
        body = json.dumps(
            {
                "model": "tiny",
                "prompt": PROMPT,
                "temperature": 1.0,
                "seed": seed,
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {target}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        tail = b""
        while data := await reader.read(1 << 16):
            tail = (tail + data)[-2000:]
        writer.close()
        assert tail.rstrip().endswith(b"data: [DONE]\n\n\r\n0"), tail
        usage = json.loads(tail.split(b"data: ")[-2].split(b"\n")[0])["usage"]
        return int(usage["completion_tokens"])

    return sum(await asyncio.gather(*map(one, range(streams))))


def run_client(way: str, target: str, streams: int, tokens: int) -> None:
    """What a client process does: tell the seconds that all streams took."""
    ask = over_grpc if way == "grpc" else over_http
    started = time.perf_counter()
    received = asyncio.run(ask(target, streams, tokens))
    seconds = time.perf_counter() - started
    assert received == streams * tokens, f"{received} tokens came, {streams * tokens} were due"
    print(json.dumps({"seconds": seconds}))


def cpu_seconds(pid: int) -> float:
    """What a process has used so far, in user and kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(streams: int, tokens: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Alternate both ways on one suite."""
    from pdserve.testing import Cluster
    from tests.tiny_models import make_tiny_model

    model = make_tiny_model(folder / "tiny", hidden_size=32, intermediate_size=64)
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_num_seqs": streams, "kv_cache_memory": 256 << 20}
    options |= {"max_num_batched_tokens": 8192, "log_level": "warning"}
    async with Cluster(model, colocated=1, gateways=1, **options) as cluster:
        router, gateway = cluster.suite.router, cluster.suite.gateways[0]
        assert router is not None
        targets = {"grpc": router.endpoint, "http": gateway.endpoint}
        pids = {"router": router.pid, "gateway": gateway.pid}
        found: dict[str, list[dict[str, float]]] = {"grpc": [], "http": []}
        for number in range(rounds + 1):
            for way in ("grpc", "http") if number % 2 else ("http", "grpc"):
                before = {name: cpu_seconds(pid) for name, pid in pids.items()}
                command = [sys.executable, __file__, "--client", way, "--target", targets[way]]
                command += ["--streams", str(streams), "--tokens", str(tokens)]
                child = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
                said, _ = await child.communicate()
                assert child.returncode == 0, f"the {way} client failed"
                seconds = float(json.loads(said)["seconds"])
                used = {f"{name}_cpu_us": cpu_seconds(pid) - before[name] for name, pid in pids.items()}
                all_tokens = streams * tokens
                entry = {"tokens_s": all_tokens / seconds, **{k: v / all_tokens * 1e6 for k, v in used.items()}}
                entry = {name: round(value, 1) for name, value in entry.items()}
                if number:  # the first is for warming up
                    found[way].append(entry)
                    print(f"round {number}, {way}: {entry}", flush=True)
    grpc, http = (statistics.median(entry["tokens_s"] for entry in found[way]) for way in ("grpc", "http"))
    ratios = [h["tokens_s"] / g["tokens_s"] for g, h in zip(found["grpc"], found["http"], strict=True)]
    return {
        "benchmark": "gateway",
        "streams": streams,
        "tokens": tokens,
        "rounds": found,
        "load_average": round(os.getloadavg()[0], 2),
        "ratio": round(statistics.median(ratios), 3),
        "gateway_tokens_s": round(http, 1),
        "grpc_tokens_s": round(grpc, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--client", choices=("grpc", "http"), help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        run_client(args.client, args.target, args.streams, args.tokens)
        return
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    with tempfile.TemporaryDirectory() as name:
        result = asyncio.run(measure(args.streams, args.tokens, args.rounds, Path(name)))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
