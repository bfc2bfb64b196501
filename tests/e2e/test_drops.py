"""200 answers at once over HTTP, gRPC (asyncio, blocking) and the Node SDK, a third of them dropped by their clients at
random moments: no block stays owned on any worker, and whoever stayed is given what an undisturbed suite gives."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pdserve.client import NO_RETRIES, Client, Completion, Event, Output, SyncClient
from pdserve.launch import ModelPart
from pdserve.rpc.errors import RpcError
from pdserve.testing import DEADLINE, Cluster
from scripts.sdk import NODE, ROOT, missing_for_example
from tests.integration.raw_http import opened
from tests.integration.suites import prompt, serve
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # npm may have to bring packages, on a busy machine

STREAMS = 50  # over each of the four ways
MAX_TOKENS = 64  # as in drop.ts
LONGEST_PROMPT = 150
LATEST_DROP = 2.0  # seconds
OPTIONS: dict[str, Any] = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
KV_MEMORY = 2 << 20  # room for some 25 of these answers on each worker: the others wait, and may be dropped waiting


@dataclass(frozen=True, slots=True)
class Job:
    """One request. Its client leaves after so many tokens or seconds; both are infinite for one that stays."""

    prompt: list[int]
    tokens: float = float("inf")
    seconds: float = float("inf")

    @property
    def stays(self) -> bool:
        return self.tokens == self.seconds == float("inf")


@dataclass(slots=True)
class Seen:
    """What a client had when it was done or left. HTTP tells no token ids: there, `count` is of its events."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    count: int = 0
    left: bool = True

    def add(self, event: Event) -> None:
        if isinstance(event, Output):
            self.text += event.text
            self.token_ids += event.token_ids
            self.count += len(event.tokens)


def jobs(way: int) -> list[Job]:
    """Every third is dropped: half of those after so many tokens (0: once it is begun), half after so many seconds."""
    chance = random.Random(way)
    drawn = []
    for index in range(STREAMS):
        tokens = prompt(chance.randint(1, LONGEST_PROMPT), seed=1000 * way + index)
        if index % 3:
            drawn.append(Job(tokens))
        elif index % 2:
            drawn.append(Job(tokens, tokens=chance.randrange(MAX_TOKENS)))
        else:
            drawn.append(Job(tokens, seconds=chance.uniform(0.0, LATEST_DROP)))
    return drawn


async def over_asyncio(client: Client, job: Job) -> Seen:
    seen = Seen()
    try:
        async with asyncio.timeout(None if job.seconds == float("inf") else job.seconds):
            async with client.generate(job.prompt, **OPTIONS) as events:
                async for event in events:
                    seen.add(event)
                    if seen.count >= job.tokens:
                        return seen
    except TimeoutError:
        return seen
    seen.left = False
    return seen


def over_threads(client: SyncClient, job: Job) -> Seen:
    seen = Seen()
    with client.generate(job.prompt, **OPTIONS) as events:
        timer = threading.Timer(min(job.seconds, 3600.0), events.close)
        timer.start()
        try:
            for event in events:
                seen.add(event)
                if seen.count >= job.tokens:
                    return seen
        except RpcError:
            if job.stays:
                raise
            return seen
        finally:
            timer.cancel()
            timer.join()
    seen.left = False
    return seen


async def over_http(url: str, job: Job) -> Seen:
    """Closes the connection without a word."""
    seen = Seen()
    body = {"prompt": job.prompt, "stream": True, **OPTIONS}
    try:
        async with asyncio.timeout(None if job.seconds == float("inf") else job.seconds):
            async with opened(f"{url}/v1/completions", body) as (reader, _):
                async for line in reader:
                    data = line.removeprefix(b"data: ").strip()
                    if data == line.strip():  # no event: a header, or the length of a chunk
                        continue
                    if data == b"[DONE]":
                        seen.left = False
                        return seen
                    seen.text += json.loads(data)["choices"][0]["text"]
                    seen.count += 1
                    if seen.count >= job.tokens:
                        return seen
    except TimeoutError:
        return seen
    raise AssertionError(f"the stream ended after {seen.text!r}")


async def over_node(program: Path, endpoint: str) -> dict[str, Any]:
    """What drop.js says of STREAMS answers of its own."""
    process = await asyncio.create_subprocess_exec(
        *("node", str(program), endpoint, str(STREAMS), "7"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        said, wrong = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, wrong.decode()
    counts: dict[str, Any] = json.loads(said)
    return counts


@pytest.fixture(scope="module")
def node_program() -> Path | None:
    """drop.js, built; None where this machine has no Node."""
    if missing_for_example("typescript"):
        return None
    make = ["make", "-C", str(ROOT / "sdk" / "examples" / "typescript")]
    for command in ([sys.executable, str(ROOT / "scripts" / "sdk.py"), "typescript"], make):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return NODE / "dist" / "drop.js"


async def test_dropped_answers_leave_nothing_behind(tmp_path: Path, node_program: Path | None) -> None:
    part = ModelPart(make_tiny_model(tmp_path / "tiny"), "tiny", prefill=1, decode=2)
    options: dict[str, Any] = {"prefix_caches": 1, "gateways": 1, "kv_cache_memory": KV_MEMORY}
    asked = [jobs(way) for way in range(3)]
    with ThreadPoolExecutor(STREAMS) as threads:
        async with serve(tmp_path / "logs", part, **options) as suite:
            loop = asyncio.get_running_loop()
            with SyncClient(suite.endpoint, retry=NO_RETRIES) as blocking:
                calls = [
                    *(over_http(suite.http, job) for job in asked[0]),
                    *(over_asyncio(suite.client, job) for job in asked[1]),
                    *(loop.run_in_executor(threads, over_threads, blocking, job) for job in asked[2]),
                ]
                node = asyncio.ensure_future(over_node(node_program, suite.endpoint)) if node_program else None
                seen = await asyncio.gather(*calls)
                told = await node if node else {"answers": {}}
            await suite.assert_all_free()
            await nothing_runs(suite)

            every = [job for way in asked for job in way]
            check_drops(every, seen, told)
            stayed = [(job, one) for job, one in zip(every, seen, strict=True) if not one.left]
            again = await undisturbed(suite, [job.prompt for job, _ in stayed] + list(told["answers"]))
            for (job, one), answer in zip(stayed, again, strict=False):
                assert one.text == answer.text, job
                assert one.token_ids in ([], answer.token_ids), job
            assert list(told["answers"].values()) == [answer.text for answer in again[len(stayed) :]]
            await suite.assert_all_free()
    if node_program is None:
        pytest.skip("150 requests over HTTP and gRPC passed; without Node, the 50 of its SDK were left out")


def check_drops(every: Sequence[Job], seen: Sequence[Seen], told: dict[str, Any]) -> None:
    """Nobody left who meant to stay, and those who left did so at every stage."""
    assert not [job for job, one in zip(every, seen, strict=True) if one.left and job.stays]
    left = [one for one in seen if one.left]
    assert len(left) > len(every) / 4  # a few finish before their moment comes
    assert [one for one in left if not one.count] and [one for one in left if one.count]
    if told["answers"]:
        assert told["failed"] == 0 and told["completed"] + told["cancelled"] == STREAMS
        assert told["cancelled"] > STREAMS / 4 and told["completed"] == len(told["answers"])


async def nothing_runs(suite: Cluster) -> None:
    """Wait until the router has nothing outstanding on any worker. AssertionError after DEADLINE seconds."""
    async with asyncio.timeout(DEADLINE):
        while any(worker.outstanding_tokens for worker in await suite.client.fleet()):
            pass


async def undisturbed(suite: Cluster, prompts: Sequence[Any]) -> list[Completion]:
    """The same requests, with nobody leaving and room for all that run at once."""
    places = asyncio.Semaphore(8)

    async def ask(given: Any) -> Completion:
        async with places:
            return await suite.client.complete(given, **OPTIONS)

    return await asyncio.gather(*map(ask, prompts))
