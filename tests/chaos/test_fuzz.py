"""Every method of every service, sent what no sane peer sends: nobody dies, hangs or leaks, and errors have a type.

PDSERVE_FUZZ says how many messages (5,000; `make soak` sends 100,000), PDSERVE_SEED repeats a run's.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from pdserve.core.sampling import SamplingParams
from pdserve.core.sequence import SequenceSpec
from pdserve.launch import ModelPart
from pdserve.rpc.channel import connect
from pdserve.rpc.convert import sampling_to_proto, spec_to_proto
from pdserve.rpc.versions import our_versions
from pdserve.v1 import decode_pb2, inference_pb2, kv_pb2, prefill_pb2, prefix_cache_pb2, worker_pb2
from tests.chaos.fuzz import Fuzzer
from tests.integration.suites import prompt, serve
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow

MESSAGES = int(os.environ.get("PDSERVE_FUZZ", "5000"))
AT_ONCE, BATCH = 16, 500  # calls; messages between two looks at the fleet
PATIENCE = 1.0  # seconds of a call; what is valid may well run that long
GROWTH = 150 << 20  # bytes of resident memory that a process may gain after the first batch
SKIPPED = {"Drain"}  # it does what it says
ENDINGS = {  # what a call may end with; UNKNOWN is an exception that nobody has caught
    grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
}  # fmt: skip


def services() -> dict[str, list[MethodDescriptor]]:
    """Methods by the name of the service in the suite that has them."""
    files = (inference_pb2, prefill_pb2, decode_pb2, worker_pb2, kv_pb2, prefix_cache_pb2)
    found = {name: service for file in files for name, service in file.DESCRIPTOR.services_by_name.items()}
    homes = {
        "router": ["InferenceService"],
        "prefill-0": ["PrefillService", "WorkerService", "LinkService"],
        "decode-0": ["DecodeService", "WorkerService", "LinkService"],
        "prefix-cache-0": ["PrefixCacheService", "WorkerService"],
    }
    return {
        home: [method for name in names for method in found[name].methods if method.name not in SKIPPED]
        for home, names in homes.items()
    }


def valid() -> dict[str, list[Message]]:
    """By method: messages that it takes, for bending."""
    spec = SequenceSpec("fuzz", tuple(prompt(20)), 20, SamplingParams(max_tokens=4, ignore_eos=True))
    sampling, stopping = sampling_to_proto(spec.params)
    generate = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt(20)), sampling=sampling, stopping=stopping
    )
    hello = decode_pb2.SessionHello(protocol=our_versions(), router_id="fuzz")
    submit = decode_pb2.Submit(ticket="fuzz", attempt=1, sequence=spec_to_proto(spec), prefill_worker_id="")
    rearm = decode_pb2.Rearm(ticket="fuzz", attempt=2, sequence=spec_to_proto(spec), prefill_worker_id="prefill-0")
    request = decode_pb2.SessionRequest
    prefill = prefill_pb2.PrefillRequest(ticket="fuzz", attempt=1, sequence=spec_to_proto(spec))
    return {
        "Generate": [generate],
        "Multiplex": [
            inference_pb2.MultiplexRequest(number=1, begin=inference_pb2.MultiplexBegin(request=generate)),
            inference_pb2.MultiplexRequest(number=1, cancel=inference_pb2.MultiplexCancel()),
        ],
        "Session": [
            request(hello=hello),
            request(submit=submit),
            request(rearm=rearm),
            request(cancel=decode_pb2.Cancel(ticket="fuzz")),
        ],
        "PrefillSession": [
            prefill_pb2.PrefillSessionRequest(hello=hello),
            prefill_pb2.PrefillSessionRequest(prefill=prefill),
            prefill_pb2.PrefillSessionRequest(cancel=prefill_pb2.PrefillCancel(ticket="fuzz", attempt=1)),
        ],
        "Watch": [worker_pb2.WatchRequest(protocol=our_versions())],
        "Tokenize": [inference_pb2.TokenizeRequest(text="hello")],
    }


async def send(
    channel: grpc.aio.Channel, method: MethodDescriptor, messages: list[bytes]
) -> tuple[grpc.StatusCode, str]:
    """Call `method` with `messages`, and read what comes; how it ended."""
    path = f"/{method.containing_service.full_name}/{method.name}"

    async def all_of_them() -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    if method.client_streaming and method.server_streaming:
        call: Any = channel.stream_stream(path)(all_of_them(), timeout=PATIENCE)
    elif method.client_streaming:
        call = channel.stream_unary(path)(all_of_them(), timeout=PATIENCE)
    elif method.server_streaming:
        call = channel.unary_stream(path)(messages[0], timeout=PATIENCE)
    else:
        call = channel.unary_unary(path)(messages[0], timeout=PATIENCE)
    try:
        if method.server_streaming:
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        if error.details() == "Internal error from Core":  # this end wrote to a call that the other had ended
            return grpc.StatusCode.ABORTED, ""
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


def resident(pid: int) -> int:
    """Bytes of a process and of its children."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(resident(int(child)) for child in children)


@pytest.mark.timeout(60 + MESSAGES // 20)  # seconds: several times what they take
async def test_nothing_that_is_sent_does_harm(tmp_path: Path) -> None:
    seed = int(os.environ.get("PDSERVE_SEED", random.randrange(2**32)))
    print(f"PDSERVE_SEED={seed}")
    part = ModelPart(make_tiny_model(tmp_path / "model"), "tiny", prefill=1, decode=1)
    async with serve(tmp_path / "logs", part, prefix_caches=1) as cluster:
        assert cluster.suite.router is not None
        processes = {"router": cluster.suite.router, **cluster.workers, "prefix-cache-0": cluster.suite.caches[0]}
        expected = (await cluster.client.complete(prompt(50), max_tokens=8, temperature=0, ignore_eos=True)).token_ids
        fuzzer, examples, endings = Fuzzer(seed), valid(), Counter[str]()
        fuzzer.known = ["fuzz", *cluster.workers, cluster.endpoint, *(one.endpoint for one in processes.values())]
        targets = [(home, method) for home, methods in services().items() for method in methods]
        first: dict[str, int] = {}
        channels = {home: connect(process.endpoint, cluster.access) for home, process in processes.items()}
        sent, gate = 0, asyncio.Semaphore(AT_ONCE)

        async def one(home: str, method: MethodDescriptor, messages: list[bytes]) -> None:
            async with gate:
                code, details = await send(channels[home], method, messages)
            endings[code.name] += 1
            assert code in ENDINGS, f"{method.full_name} on {home}: {code.name}, {details!r} for {messages}"

        while sent < MESSAGES:
            calls = []
            for _ in range(BATCH):
                home, method = fuzzer.rng.choice(targets)
                messages = fuzzer.requests(method, examples.get(method.name, []))
                sent += max(1, len(messages))
                calls.append(one(home, method, messages))
            await asyncio.gather(*calls)
            assert all(process.returncode is None for process in processes.values())
            answer = await cluster.client.complete(prompt(50), max_tokens=8, temperature=0, ignore_eos=True, timeout=30)
            assert answer.token_ids == expected
            await cluster.assert_all_free()
            for home, process in processes.items():
                size = resident(process.pid)
                assert size - first.setdefault(home, size) < GROWTH, f"{home} grew by {size - first[home]} bytes"
        for channel in channels.values():
            await channel.close()
    print(sent, dict(endings))
    for log in sorted((tmp_path / "logs").glob("*.log")):
        for line in log.read_text().splitlines():
            trace = json.loads(line).get("exception", "")
            assert not trace, f"{log.name}: {trace}"
