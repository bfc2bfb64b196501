"""A client that sends when a request is due, whatever became of the others; the load of benchmarks/overload.py.

It reads windows as lines of JSON and answers each with one: what became of its requests, by their due times. It does
little else: bare stubs, requests that are made before the window, and nothing is judged while it runs.

usage: python benchmarks/open_loop.py ENDPOINT
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from pdserve.core.errors import NoCapacity
from pdserve.core.slo import percentile
from pdserve.rpc.channel import connect
from pdserve.rpc.errors import error_from_call
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1.inference_pb2_grpc import InferenceServiceStub

CONNECTIONS = 4
RAMP = 4.0  # seconds before the window at the same rate: the queues are as they will be
TAIL = 2.0  # and after it: nobody profits from the end
PROMPT, ANSWER = (64, 384), (8, 40)  # tokens, evenly spread
VOCABULARY = 250
DEADLINE = 60.0
LATE = 0.05  # seconds; a client whose 99th percentile is sent later than that is too slow


@dataclass(frozen=True, slots=True)
class Window:
    """`rate` requests a second, or a `crowd` of so many at a time, for `seconds`; the targets that each states. A crowd
    states none: it is to be served."""

    ttft_ms: float
    itl_ms: float
    itl_percentile: float
    seconds: float
    seed: int
    rate: float = 0.0
    crowd: int = 0

    def request(self, chance: random.Random) -> pb.GenerateRequest:
        tokens = [chance.randrange(VOCABULARY) for _ in range(chance.randint(*PROMPT))]
        stated = pb.SloTargets() if self.crowd else pb.SloTargets(ttft_ms=self.ttft_ms, itl_ms=self.itl_ms)
        return pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=tokens),
            sampling=pb.SamplingOptions(temperature=0.0),
            stopping=pb.StoppingOptions(max_tokens=chance.randint(*ANSWER), ignore_eos=True),
            slo=stated,
        )

    def arrivals(self, chance: random.Random) -> list[float]:
        """Seconds from the beginning of the ramp."""
        times, at = list[float](), 0.0
        while (at := at + chance.expovariate(self.rate)) < RAMP + self.seconds + TAIL:
            times.append(at)
        return times


@dataclass(slots=True)
class Outcome:
    """One request; times on the monotonic clock. `error` is a status code's name."""

    due: float
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    refused: bool = False
    retry_info: bool = False
    error: str = ""

    def met(self, window: Window) -> bool:
        """Whether it was answered, and both targets were kept from when it was due."""
        if self.refused or self.error or not self.arrivals:
            return False
        gaps = [b - a for a, b in itertools.pairwise(self.arrivals)]
        stalled = bool(gaps) and percentile(gaps, window.itl_percentile) > window.itl_ms / 1e3
        return not stalled and self.arrivals[0] - self.due <= window.ttft_ms / 1e3


async def ask(stub: InferenceServiceStub, request: pb.GenerateRequest, due: float) -> Outcome:
    outcome = Outcome(due, time.monotonic())
    try:
        async for response in stub.Generate(request, timeout=DEADLINE):  # type: ignore[attr-defined]
            if response.HasField("output"):
                outcome.arrivals += [time.monotonic()] * len(response.output.tokens)
    except grpc.aio.AioRpcError as failure:
        error = error_from_call(failure)
        outcome.refused = isinstance(error, NoCapacity) and not outcome.arrivals
        outcome.retry_info = isinstance(error, NoCapacity) and error.retry_after is not None
        outcome.error = "" if outcome.refused else failure.code().name
    outcome.ended = time.monotonic()
    return outcome


async def crowd(stubs: Sequence[InferenceServiceStub], window: Window) -> list[Outcome]:
    """So many at a time, one after the other."""
    chance, until = random.Random(window.seed), time.monotonic() + window.seconds
    outcomes: list[Outcome] = []

    async def lane(stub: InferenceServiceStub) -> None:
        while (now := time.monotonic()) < until:
            outcomes.append(await ask(stub, window.request(chance), now))

    await asyncio.gather(*(lane(stubs[index % len(stubs)]) for index in range(window.crowd)))
    return outcomes


async def flow(stubs: Sequence[InferenceServiceStub], window: Window) -> tuple[list[Outcome], float]:
    """All of them, ramp and tail too, and when the ramp ended."""
    chance = random.Random(window.seed)
    plan = [(at, window.request(chance)) for at in window.arrivals(chance)]
    began, tasks = time.monotonic() + 0.1, []
    for number, (at, request) in enumerate(plan):
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        tasks.append(asyncio.create_task(ask(stubs[number % len(stubs)], request, began + at)))
    return list(await asyncio.gather(*tasks)), began + RAMP


def told(outcomes: list[Outcome], window: Window, cpu: float, took: float) -> dict[str, Any]:
    """Of those that were due in the window."""
    met = sum(outcome.met(window) for outcome in outcomes)
    refused = [outcome for outcome in outcomes if outcome.refused]
    early = [1e3 * (outcome.ended - outcome.due) for outcome in refused] or [0.0]
    late = [outcome.sent - outcome.due for outcome in outcomes]
    first = [1e3 * (outcome.arrivals[0] - outcome.due) for outcome in outcomes if outcome.arrivals] or [0.0]
    return {
        "asked": len(outcomes),
        "met": met,
        "goodput_s": met / window.seconds,
        "attainment": met / max(1, len(outcomes)),
        "admitted_attainment": met / max(1, len(outcomes) - len(refused)),
        "answered_s": sum(not (outcome.refused or outcome.error) for outcome in outcomes) / took,
        "ttft_ms": {"p50": round(percentile(first, 50), 1), "p99": round(percentile(first, 99), 1)},
        "refused": len(refused),
        "with_retry_info": sum(outcome.retry_info for outcome in refused),
        "refusal_ms": {"p50": round(percentile(early, 50), 1), "p99": round(percentile(early, 99), 1)},
        "errors": Counter(outcome.error for outcome in outcomes if outcome.error),
        "client_cpu": round(cpu / took, 2),
        "client_was_late": percentile(late, 99) > LATE,
        "sent_late_ms_p99": round(1e3 * percentile(late, 99), 1),
        "took_s": took,
    }


async def serve(endpoint: str) -> None:
    channels = [connect(endpoint) for _ in range(CONNECTIONS)]
    stubs = [InferenceServiceStub(channel) for channel in channels]
    while line := await asyncio.to_thread(sys.stdin.readline):
        window = Window(**json.loads(line))
        began, used = time.monotonic(), time.process_time()
        if window.crowd:
            outcomes = await crowd(stubs, window)
        else:
            everyone, start = await flow(stubs, window)
            outcomes = [outcome for outcome in everyone if start <= outcome.due < start + window.seconds]
        took = time.monotonic() - began
        print(json.dumps(told(outcomes, window, time.process_time() - used, took)), flush=True)
    for channel in channels:
        await channel.close()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
