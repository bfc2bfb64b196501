"""Does serving disturb the engine? The interval between engine steps with 256 streams, with and without RPC.

The same engine, the same tiny model and the same 256 sequences, alternating in one run: (a) stepped in a bare loop,
(b) inside a decode worker whose front streams every step's tokens over a gRPC session to this process. The engine has
core 0 to itself in both; the front and this process share the others. Only intervals between two steps that both ran
all 256 sequences count. Prints one JSON object as its last line.
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
from itertools import pairwise
from pathlib import Path

ENGINE_CORE = 0
PROMPT_TOKENS = 32


def intervals_ms(steps: list[tuple[int, int]], streams: int) -> list[float]:
    """Gaps between steps that ran all streams, in milliseconds; the first tenth is warm-up."""
    gaps = [(b - a) / 1e6 for (a, n), (b, m) in pairwise(steps) if n == m == streams]
    return gaps[len(gaps) // 10 :]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def other_cores() -> set[int]:
    return set(range(os.cpu_count() or 1)) - {ENGINE_CORE} or {ENGINE_CORE}


def spec_values(index: int, tokens: int) -> tuple[list[int], dict[str, object]]:
    prompt = [(index * 31 + i * 17) % 250 for i in range(PROMPT_TOKENS)]
    return prompt, {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}


def bare(model: Path, streams: int, tokens: int) -> None:
    """Run as a process of its own: the engine in a loop, nothing else."""
    import time

    import torch

    from pdserve.core.sampling import SamplingParams
    from pdserve.core.sequence import SequenceSpec
    from pdserve.engine.build import EngineOptions, build_engine

    os.sched_setaffinity(0, {ENGINE_CORE})
    torch.set_num_threads(1)
    options = EngineOptions(
        model, "float32", "cpu", kv_cache_bytes=256 << 20, max_num_seqs=streams, max_num_batched_tokens=8192
    )
    engine = build_engine(options).engine
    for index in range(streams):
        prompt, values = spec_values(index, tokens)
        engine.add(str(index), SequenceSpec(str(index), tuple(prompt), len(prompt), SamplingParams(**values)))  # type: ignore[arg-type]
    steps = []
    while engine.has_work:
        engine.step()
        steps.append((time.monotonic_ns(), len(engine.scheduler.running)))
        engine.take_outputs()
    print(json.dumps(steps))


async def served(model: Path, streams: int, tokens: int, folder: Path) -> list[tuple[int, int]]:
    """The engine inside a decode worker, its tokens streamed here over one session."""
    from pdserve.core.sampling import SamplingParams
    from pdserve.core.sequence import SequenceSpec
    from pdserve.launch import Service
    from pdserve.rpc.channel import connect
    from pdserve.rpc.convert import spec_to_proto
    from pdserve.rpc.versions import our_versions
    from pdserve.v1 import decode_pb2 as pb
    from pdserve.v1.decode_pb2_grpc import DecodeServiceStub

    log = folder / "steps.json"
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    flags = f"--model {model} --dtype float32 --device cpu --kv-cache-memory {256 << 20} --max-num-seqs {streams}"
    flags += f" --max-num-batched-tokens 8192 --cores {ENGINE_CORE} --threads 1 --step-log {log}"
    flags += f" --front-cores {','.join(map(str, other_cores()))}"
    service = await Service.start("decode", "decode", flags.split(), log_folder=folder, listener=lambda event: None)
    try:
        await service.ready()
        os.sched_setaffinity(0, other_cores())
        channel = connect(service.endpoint)
        session = DecodeServiceStub(channel).Session()
        hello = pb.SessionHello(protocol=our_versions(), router_id="bench")
        await session.write(pb.SessionRequest(hello=hello))
        for index in range(streams):
            prompt, values = spec_values(index, tokens)
            spec = SequenceSpec(str(index), tuple(prompt), len(prompt), SamplingParams(**values))  # type: ignore[arg-type]
            submit = pb.Submit(ticket=f"{index:032x}", attempt=1, sequence=spec_to_proto(spec))
            await session.write(pb.SessionRequest(submit=submit))
        received = ended = 0
        while ended < streams:
            response = await session.read()
            assert isinstance(response, pb.SessionResponse), "the session ended early"
            received += len(response.step.tokens)
            ended += len(response.step.ends)
        assert received == streams * tokens, f"{received} tokens came, {streams * tokens} were due"
        session.cancel()
        await channel.close()
    finally:
        service.terminate()
        await service.exited
        await service.close()
    return [(ended, running) for _, ended, running in json.loads(log.read_text())["steps"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare:
        bare(args.bare, args.streams, args.tokens)
        return
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.tiny_models import make_tiny_model

    rounds, ratios = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_tiny_model(folder / "model", "llama")
        command = [
            sys.executable,
            __file__,
            "--bare",
            str(model),
            "--streams",
            str(args.streams),
            "--tokens",
            str(args.tokens),
        ]
        for number in range(args.rounds):
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            without = intervals_ms(json.loads(output.splitlines()[-1]), args.streams)
            with_rpc = intervals_ms(asyncio.run(served(model, args.streams, args.tokens, folder)), args.streams)
            ratio = percentile(with_rpc, 0.99) / percentile(without, 0.99)
            ratios.append(ratio)
            rounds.append(
                {
                    "steps": [len(without), len(with_rpc)],
                    "p50_ms": [round(percentile(without, 0.5), 3), round(percentile(with_rpc, 0.5), 3)],
                    "p99_ms": [round(percentile(without, 0.99), 3), round(percentile(with_rpc, 0.99), 3)],
                    "p99_ratio": round(ratio, 3),
                }
            )
            print(f"round {number + 1}: {rounds[-1]}", flush=True)
    median = round(statistics.median(ratios), 3)
    print(json.dumps({"benchmark": "steps", "streams": args.streams, "rounds": rounds, "p99_ratio": median}))


if __name__ == "__main__":
    main()
