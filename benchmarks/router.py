"""What does the router cost? How long it decides, what it adds to a first token and to the gaps, how much it relays.

- decide: blocks looked up, views remade for a worker that reported, and the decision, for a prompt of 8,192 hashed
  tokens over 64 + 64 and 1,000 + 1,000 workers; every eighth prefill worker holds a part of the prompt.
- added: the same prefill and decode worker asked through the router and directly, over the same kind of sessions, in
  turn, by one client. The prefill worker alone shows what of the reservation and the hand-off is seen in a first token,
  and a prompt whose pages were reserved before shows what of the reservation is.
- relay: a router between a source of tokens that is always ahead (benchmarks/token_source.py) and 200 readers.

usage: python benchmarks/router.py [--rounds N] [--requests N] [--streams N] [--tokens N]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdserve.rpc.access import Access

PROMPT_TOKENS, BLOCK = 8192, 16
SHORT, ANSWER = 64, 48  # tokens of the requests that are timed
REMOTE: dict[str, dict[str, object]] = {"router": {"local-prefill": False}}  # as the direct client does it
Timing = tuple[float, list[float]]


def decide_us(count: int, decisions: int = 300) -> float:
    """Median microseconds of a decision over `count` workers of each role."""
    from pdserve.core.hashing import block_hashes, root_hash
    from pdserve.core.layout import KVLayout
    from pdserve.policy.fleet import PlacementRequest
    from pdserve.policy.routing import choose_pair
    from pdserve.router.assignment import assign
    from pdserve.router.config import RouterSettings
    from pdserve.router.fleet import Fleet
    from pdserve.router.models import Models, ServedModel
    from pdserve.rpc.convert import layout_to_proto
    from pdserve.v1 import worker_pb2

    class NoCodec:
        """Nothing is tokenized here."""

    layout = KVLayout(BLOCK, 32, 8, 128, "bfloat16", bytes(16))
    model = ServedModel("m", Path("m"), frozenset({"m"}), NoCodec(), None, ())  # type: ignore[arg-type]
    fleet = Fleet(RouterSettings.load([]), Models((model,)))
    hashes = {layout: block_hashes(root_hash(layout, ""), range(PROMPT_TOKENS), BLOCK)}
    rng = random.Random(1)
    speed = worker_pb2.WorkerSpeed(step_seconds=5e-3, token_seconds=1e-4, read_seconds=1e-7)
    speed.prompt_steps = speed.answer_steps = 100

    def report(name: str, stored: list[bytes], number: int) -> worker_pb2.WorkerDelta:
        load = worker_pb2.WorkerLoad(
            free_blocks=30_000, running=rng.randrange(50), pending_prefill_tokens=rng.randrange(2000), speed=speed
        )
        return worker_pb2.WorkerDelta(sequence=number, load=load, stored=stored)

    names = [f"{role}-{index}" for role in ("prefill", "decode") for index in range(count)]
    for index, name in enumerate(names):
        worker = fleet.adopt(name)
        role = worker_pb2.ROLE_PREFILL if name.startswith("prefill") else worker_pb2.ROLE_DECODE
        worker.up(
            worker_pb2.WorkerSnapshot(
                worker_id=name,
                incarnation="1",
                role=role,
                model="m",
                layout=layout_to_proto(layout),
                max_model_len=1 << 17,
                vocab_size=1 << 17,
                total_blocks=32_768,
                max_num_seqs=256,
                max_num_batched_tokens=8192,
                endpoint=name,
            ),
            None,
            None,
        )
        part = hashes[layout][: rng.randrange(len(hashes[layout]))] if index % 8 == 0 else []
        worker.take_delta(report(name, part, 1))
    workers, seconds = {worker.worker_id: worker for worker in fleet.workers}, []
    numbers = dict.fromkeys(names, 1)
    for draw in range(decisions):
        name = rng.choice(names)
        numbers[name] += 1
        workers[name].take_delta(report(name, [], numbers[name]))
        began = time.perf_counter()
        now = asyncio.get_running_loop().time()
        request = PlacementRequest(PROMPT_TOKENS, 500, fleet.held(model, hashes), expected=200, draw=draw, now=now)
        view = fleet.view(model)
        decision = choose_pair(view, request)
        assignment = assign(fleet, view, decision, request)
        seconds.append(time.perf_counter() - began)
        assert assignment is not None, decision
        assignment.release()
    return 1e6 * statistics.median(seconds)


class Direct:
    """The client that asks the two workers itself, as a router does and without one."""

    def __init__(self, prefill: str, decode: str, ids: tuple[str, str], access: Access) -> None:
        from pdserve.router.prefill_session import PrefillSession
        from pdserve.router.session import DecodeSession
        from pdserve.rpc.channel import connect

        self._channels = connect(prefill, access), connect(decode, access)
        self._prefills = PrefillSession(self._channels[0], "router-bench", 10.0)
        self._session = DecodeSession(self._channels[1], "router-bench", 10.0)
        self._ids, self._endpoint = ids, decode
        self._running: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        for session in (self._prefills, self._session):
            await session.open()
            self._running.append(asyncio.create_task(session.run()))

    async def close(self) -> None:
        for running in self._running:
            running.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for channel in self._channels:
            await channel.close()

    async def ask(self, tokens: list[int]) -> Timing:
        """TTFT and gaps, in seconds."""

        return await self._ask(tokens, ahead=False)

    async def ask_reserved(self, tokens: list[int]) -> Timing:
        """The same of a prompt whose pages were reserved before, so that nothing can wait for that."""
        return await self._ask(tokens, ahead=True)

    async def _ask(self, tokens: list[int], *, ahead: bool) -> Timing:
        from pdserve.router.events import Ended, Event, Lost, NewToken, Reserved
        from pdserve.rpc.convert import spec_to_proto

        ticket, stamps, reserved, over = secrets.token_hex(16), list[float](), asyncio.Event(), asyncio.Event()

        def sink(event: Event) -> None:
            if isinstance(event, NewToken):
                stamps.append(time.perf_counter())
            elif isinstance(event, Reserved):
                reserved.set()
            elif isinstance(event, Ended | Lost):
                over.set()

        def submit() -> None:
            self._session.submit(ticket, 1, spec_to_proto(_spec(tokens, ANSWER)), self._ids[0], sink)

        if ahead:
            submit()
            await reserved.wait()
        began = time.perf_counter()
        first = self._prefill(ticket, _spec(tokens, ANSWER), self._ids[1], self._endpoint)
        if not ahead:
            submit()
        came = await first
        await over.wait()
        assert len(stamps) == ANSWER - 1, f"{len(stamps)} tokens came"
        return came - began, [b - a for a, b in itertools.pairwise([came, *stamps])]

    async def ask_alone(self, tokens: list[int]) -> Timing:
        """TTFT, in seconds, where nobody reserves anything: the answer is the one token that the prefill makes."""
        began = time.perf_counter()
        return await self._prefill(secrets.token_hex(16), _spec(tokens, 1)) - began, []

    def _prefill(self, ticket: str, spec: Any, decode_id: str = "", decode_endpoint: str = "") -> asyncio.Future[float]:
        """When the first token comes."""
        from pdserve.router.events import Event, FirstToken
        from pdserve.rpc.convert import spec_to_proto
        from pdserve.v1 import prefill_pb2

        first: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        def sink(event: Event) -> None:
            assert isinstance(event, FirstToken), event
            first.set_result(time.perf_counter())

        request = prefill_pb2.PrefillRequest(ticket=ticket, attempt=1, sequence=spec_to_proto(spec))
        request.decode_worker_id, request.decode_endpoint = decode_id, decode_endpoint
        self._prefills.prefill(request, None, sink)
        return first


def _spec(tokens: list[int], answer: int) -> Any:
    from pdserve.core.sampling import SamplingParams
    from pdserve.core.sequence import SequenceSpec

    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    return SequenceSpec(request_id="bench", token_ids=tuple(tokens), prompt_len=len(tokens), params=params)


async def added(rounds: int, requests: int, folder: Path) -> dict[str, Any]:
    """What the router adds to TTFT and to a gap, idle: medians of `requests` each way, in turn."""
    from pdserve.launch import ModelPart
    from pdserve.rpc.channel import connect
    from pdserve.testing import Cluster
    from pdserve.v1 import inference_pb2 as pb
    from pdserve.v1.inference_pb2_grpc import InferenceServiceStub
    from tests.tiny_models import make_tiny_model

    model = make_tiny_model(folder / "tiny", hidden_size=32, intermediate_size=64)
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "kv_cache_memory": 64 << 20, "log_level": "warning"}
    rng, reserve = random.Random(2), list[float]()
    async with (
        Cluster([ModelPart(model, "tiny", prefill=1, decode=1)], per_worker=REMOTE, **options) as cluster,
        connect(cluster.endpoint) as channel,
    ):
        stub = InferenceServiceStub(channel)
        prefill, decode = cluster.workers["prefill-0"], cluster.workers["decode-0"]
        direct = Direct(prefill.endpoint, decode.endpoint, ("prefill-0", "decode-0"), cluster.access)
        await direct.open()

        async def routed(tokens: list[int]) -> Timing:
            stamps: list[float] = []
            request = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=tokens),
                sampling=pb.SamplingOptions(temperature=0.0),
                stopping=pb.StoppingOptions(max_tokens=ANSWER, ignore_eos=True),
            )
            began = time.perf_counter()
            async for response in stub.Generate(request):
                stamps += [time.perf_counter()] * len(response.output.tokens)
                if response.HasField("finish"):
                    reserve.append(response.finish.usage.stages.reserve_ms)
            return stamps[0] - began, [b - a for a, b in itertools.pairwise(stamps)]

        ways: dict[str, Callable[[list[int]], Awaitable[Timing]]] = {
            "alone": direct.ask_alone,
            "reserved": direct.ask_reserved,
            "direct": direct.ask,
            "routed": routed,
        }
        ttft: dict[str, list[float]] = {way: [] for way in ways}
        gaps: dict[str, list[float]] = {"direct": [], "routed": []}
        for number in range(rounds * requests):
            for way in list(ways) if number % 2 else list(ways)[::-1]:
                first, between = await ways[way]([rng.randrange(250) for _ in range(SHORT)])
                if number >= requests // 4:  # the first ones are for warming up
                    ttft[way].append(1e3 * first)
                    if way in gaps:
                        gaps[way].append(1e3 * statistics.mean(between))
        await direct.close()
    medians = {
        f"{name}_{way}_ms": round(statistics.median(found[way]), 3)
        for name, found in (("ttft", ttft), ("itl", gaps))
        for way in found
    }
    return {
        **medians,
        "added_ttft_ms": round(medians["ttft_routed_ms"] - medians["ttft_direct_ms"], 3),
        "added_itl_ms": round(medians["itl_routed_ms"] - medians["itl_direct_ms"], 3),
        # Nothing waits for the reservation, but its work, and that of pushing KV, is done by the same cores.
        "handoff_in_ttft_ms": round(medians["ttft_direct_ms"] - medians["ttft_alone_ms"], 3),
        # By how much sooner the first token comes where everything is ready but it, and the reservation is there, too.
        "reserve_exposed_ms": round(medians["ttft_direct_ms"] - medians["ttft_reserved_ms"], 3),
        "reserve_ms": round(statistics.median(reserve), 3),
    }


def run_reader(target: str, streams: int, tokens: int) -> None:
    """What the reading process does: tell the seconds that all streams took."""
    from benchmarks.gateway import over_grpc

    started = time.perf_counter()
    received = asyncio.run(over_grpc(target, streams, tokens))
    seconds = time.perf_counter() - started
    assert received == streams * tokens, f"{received} tokens came, {streams * tokens} were due"
    print(json.dumps({"seconds": seconds}))


async def relay(rounds: int, streams: int, tokens: int, folder: Path) -> dict[str, Any]:
    """Tokens a second through one router process, and its CPU time for each."""
    from benchmarks.gateway import cpu_seconds
    from pdserve.launch import Service
    from tests.tiny_models import make_tiny_model

    model = make_tiny_model(folder / "relay", hidden_size=32, intermediate_size=64)
    command = [sys.executable, str(Path(__file__).with_name("token_source.py"))]
    source = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    rates, used = list[float](), list[float]()
    try:
        assert source.stdout is not None
        endpoint = (await source.stdout.readline()).decode().strip()
        flags = ("--worker", endpoint, "--model", f"tiny={model}", "--log-level", "warning", "--port", "0")
        router = await Service.start("router", "router", flags, log_folder=folder, listener=lambda event: None)
        try:
            await router.ready()
            for number in range(rounds + 1):
                before = cpu_seconds(router.pid)
                reader = [sys.executable, __file__, "--reader", router.endpoint]
                reader += ["--streams", str(streams), "--tokens", str(tokens)]
                child = await asyncio.create_subprocess_exec(*reader, stdout=subprocess.PIPE)
                said, _ = await child.communicate()
                assert child.returncode == 0, "the reader failed"
                if number:  # the first is for warming up
                    rates.append(streams * tokens / float(json.loads(said)["seconds"]))
                    used.append(1e6 * (cpu_seconds(router.pid) - before) / (streams * tokens))
        finally:
            router.terminate()
            await router.close()
    finally:
        await source.communicate(b"")  # the end of its input is its end
    return {
        "relay_tokens_s": round(statistics.median(rates), 1),
        "router_cpu_us_a_token": round(statistics.median(used), 1),
    }


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from pdserve.telemetry.logs import setup_logs

    setup_logs("bench", "warning")
    found: dict[str, Any] = {"benchmark": "router", "decide_us_64": round(decide_us(64), 1)}
    found["decide_us_1000"] = round(decide_us(1000), 1)
    print(found, flush=True)
    found |= await added(args.rounds, args.requests, folder)
    print(found, flush=True)
    found |= await relay(args.rounds, args.streams, args.tokens, folder)
    return {**found, "load_average": round(os.getloadavg()[0], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=100, help="each way and round, for what the router adds")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--reader", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    if args.reader:
        run_reader(args.reader, args.streams, args.tokens)
        return
    with tempfile.TemporaryDirectory() as name:
        result = asyncio.run(measure(args, Path(name)))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
