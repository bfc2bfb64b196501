"""A decode worker that stops hands what runs on it to another one, with its KV: nobody computes it again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdserve.client import Output
from pdserve.core.sequence import EndReason
from pdserve.launch import ModelPart
from pdserve.rpc.channel import connect
from pdserve.rpc.convert import end_reason_from_proto
from pdserve.rpc.versions import our_versions
from pdserve.testing import Cluster
from pdserve.v1 import decode_pb2
from tests.integration.scraping import heartbeats, scrape, scrape_until
from tests.integration.suites import LONG_ENOUGH, LONG_MODEL, prompt, serve
from tests.integration.test_rearm import Session
from tests.tiny_models import make_tiny_model

GRACE = 300  # seconds; nothing here takes so long
MORE = 40  # tokens that are read of an answer after its worker is gone
WANTED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7, "presence_penalty": 0.6, "frequency_penalty": 0.3, "logprobs": 2},
    {"temperature": 1.2, "seed": 8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 0.0, "logprobs": 1, "repetition_penalty": 1.1},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("drain"), "llama", **LONG_MODEL)


class Answer:
    """An answer that is read until somebody says that it is enough."""

    def __init__(self, cluster: Cluster, number: int, max_tokens: int = LONG_ENOUGH) -> None:
        self.options: dict[str, Any] = {**WANTED[number % len(WANTED)], "ignore_eos": True}
        self._max_tokens = max_tokens
        self.prompt = prompt(50 + 7 * number, seed=number)
        self.tokens: list[Any] = []
        self.finish: Any = None
        self._news = asyncio.Event()
        self._enough: int | None = None
        self._cluster = cluster
        self.task = asyncio.create_task(self._read())

    async def until(self, count: int) -> None:
        """Wait until there are so many tokens."""
        while len(self.tokens) < count:
            self._news.clear()
            waits = asyncio.create_task(self._news.wait())
            await asyncio.wait({waits, self.task}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            waits.cancel()
            if self.task.done():
                self.task.result()
                assert len(self.tokens) >= count, "it ended before"

    async def end(self) -> None:
        """Read some more, and leave."""
        self._enough = len(self.tokens) + MORE
        await self.task

    async def check(self) -> None:
        """The tokens are those of an answer that nobody disturbed."""
        count = len(self.tokens)
        undisturbed = await self._cluster.client.complete(
            self.prompt, max_tokens=count, cache_salt="another", **self.options
        )
        assert [token.id for token in self.tokens] == list(undisturbed.token_ids)
        for ours, theirs in zip(self.tokens, undisturbed.tokens, strict=True):
            assert theirs.logprob is None or ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
            assert len(ours.top) == len(theirs.top) == self.options.get("logprobs", 0)

    async def _read(self) -> None:
        request = self._cluster.client.generate(self.prompt, max_tokens=self._max_tokens, **self.options)
        async with request as events:
            async for event in events:
                if isinstance(event, Output):
                    self.tokens += event.tokens
                    self._news.set()
                    if self._enough is not None and len(self.tokens) >= self._enough:
                        return


@asynccontextmanager
async def suite_of(model: Path, logs: Path, decode: int = 2) -> AsyncIterator[Cluster]:
    """A suite whose decode workers hand off all that runs on them, if they may not finish it in peace."""
    flags: dict[str, dict[str, object]] = {f"decode-{number}": {"drain-seconds": GRACE} for number in range(decode)}
    flags["router"] = {"hand-off": "all"}
    part = ModelPart(model, "tiny", prefill=1, decode=decode)
    async with serve(logs, part, metrics=True, per_worker=flags, kv_cache_memory=64 << 20) as suite:
        yield suite


@asynccontextmanager
async def running(suite: Cluster, count: int, max_tokens: int = LONG_ENOUGH) -> AsyncIterator[list[Answer]]:
    """So many answers that run, on all decode workers."""
    answers = [Answer(suite, number, max_tokens) for number in range(count)]
    try:
        for answer in answers:
            await answer.until(5)
        yield answers
    finally:
        for answer in answers:
            answer.task.cancel()
        await asyncio.gather(*(answer.task for answer in answers), return_exceptions=True)


async def first_peer(suite: Cluster, logs: Path, worker: str) -> str:
    """Wait until `worker` hands something off, and say to whom."""
    async with asyncio.timeout(60), aclosing(heartbeats(suite, worker)) as beats:
        async for _ in beats:
            for line in (logs / f"{worker}.log").read_text().splitlines():
                if (record := json.loads(line))["event"] == "handing_off":
                    return str(record["peer"])
    raise AssertionError(f"{worker} is gone")


async def hand_offs(suite: Cluster) -> Callable[[str], int]:
    """How many of each outcome the router counts."""
    found = await scrape(suite, "router")
    return lambda outcome: int(found[f"pdserve_request_hand_offs_total{{model_name=tiny,outcome={outcome}}}"])


async def test_what_runs_goes_on_elsewhere_token_for_token_and_is_not_computed_again(
    model: Path, tmp_path: Path
) -> None:
    """Long before its grace is over the worker is gone, and no client saw anything but a gap."""
    async with suite_of(model, tmp_path) as suite, running(suite, 6) as answers:
        leaving = suite.workers["decode-0"]
        load = await scrape_until(suite, "decode-0", lambda found: found["pdserve_num_requests_running"] > 0)
        ran = int(load["pdserve_num_requests_running"])
        prefilled = (await scrape(suite, "prefill-0"))["pdserve_engine_tokens_total"]
        leaving.terminate()
        async with asyncio.timeout(GRACE / 3):
            assert await leaving.exited == 0
        for answer in answers:
            await answer.end()
        count = await hand_offs(suite)
        assert (count("moved"), count("replayed"), count("failed")) == (ran, 0, 0)
        assert (await scrape(suite, "router"))["pdserve_hand_off_gap_seconds_count{model_name=tiny}"] == ran
        assert (await scrape(suite, "prefill-0"))["pdserve_engine_tokens_total"] == prefilled
        decoded = await scrape(suite, "decode-1")
        assert decoded["pdserve_engine_tokens_total"] == decoded["pdserve_engine_sampled_tokens_total"]
        await suite.assert_all_free()
        for answer in answers:
            await answer.check()


async def test_alone_a_worker_finishes_what_it_has(model: Path, tmp_path: Path) -> None:
    async with suite_of(model, tmp_path, decode=1) as suite, running(suite, 2, max_tokens=400) as answers:
        leaving = suite.workers["decode-0"]
        leaving.terminate()
        for answer in answers:
            await answer.task
            assert len(answer.tokens) == 400
        assert await leaving.exited == 0
        count = await hand_offs(suite)
        assert count("moved") == count("replayed") == 0


async def test_the_worker_that_is_to_take_over_dies_in_the_middle(model: Path, tmp_path: Path) -> None:
    """What ran there is replayed; what was going there goes on where it is, or at somebody else's, token for token."""
    async with suite_of(model, tmp_path, decode=3) as suite, running(suite, 6) as answers:
        leaving, others = suite.workers["decode-0"], {"decode-1", "decode-2"}
        for name in others:
            os.killpg(suite.workers[name].pid, signal.SIGSTOP)  # a hand-off to them cannot be done meanwhile
        leaving.terminate()
        victim = await first_peer(suite, tmp_path, "decode-0")
        await suite.kill(victim)
        [other] = others - {victim}
        os.killpg(suite.workers[other].pid, signal.SIGCONT)
        assert await leaving.exited == 0
        for answer in answers:
            await answer.end()
        assert (await hand_offs(suite))("failed") > 0
        await suite.assert_all_free()
        for answer in answers:
            await answer.check()


async def test_clients_that_leave_in_the_middle_of_a_hand_off_leave_nothing_behind(model: Path, tmp_path: Path) -> None:
    async with suite_of(model, tmp_path) as suite:
        async with running(suite, 6):
            leaving, other = suite.workers["decode-0"], suite.workers["decode-1"]
            os.killpg(other.pid, signal.SIGSTOP)
            leaving.terminate()
            assert await first_peer(suite, tmp_path, "decode-0") == "decode-1"
        os.killpg(other.pid, signal.SIGCONT)
        assert await leaving.exited == 0
        await suite.assert_all_free()
        assert (await hand_offs(suite))("replayed") == 0
        assert len((await suite.client.complete("hello", max_tokens=3, ignore_eos=True)).tokens) == 3


async def test_hand_offs_against_the_book(model: Path, tmp_path: Path) -> None:
    """Each is answered, and none costs the sequence anything."""
    async with (
        suite_of(model, tmp_path, decode=1) as suite,
        connect(suite.workers["decode-0"].endpoint, suite.access) as channel,
    ):
        session = Session(channel)
        await session.send(hello=decode_pb2.SessionHello(protocol=our_versions(), router_id="by hand"))
        assert isinstance(await session.hear(), decode_pb2.SessionWelcome)
        await session.submit("t", "")
        assert isinstance(await session.hear(), decode_pb2.Ready)
        good: dict[str, Any] = {
            "ticket": "t", "new_ticket": "n", "attempt": 1, "decode_worker_id": "elsewhere",
            "decode_endpoint": "127.0.0.1:1", "tokens": 40,
        }  # fmt: skip
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("1 to 256 characters", {"new_ticket": ""}),
            ("decode_endpoint", {"decode_endpoint": "nowhere"}),
            ("another worker", {"decode_worker_id": "decode-0"}),
            ("attempt", {"attempt": (1 << 32) - 1}),
            ("its new ticket is here", {"new_ticket": "t"}),
            ("39 tokens are to be sent", {"tokens": 39}),  # fewer than the prompt has
            ("no link to elsewhere", {}),
        ]
        for reason, options in wrong:
            await session.send(hand_off=decode_pb2.HandOff(**{**good, **options}))
            failed = await session.hear()
            assert isinstance(failed, decode_pb2.HandOffFailed) and reason in failed.reason, (failed, reason)
        await session.send(hand_off=decode_pb2.HandOff(**{**good, "ticket": "unknown"}))
        await session.send(call_off=decode_pb2.CallOff(ticket="t", new_ticket="unknown"))
        await session.send(call_off=decode_pb2.CallOff(ticket="unknown", new_ticket="n"))
        await session.send(settled=decode_pb2.Settled())
        await session.send(cancel=decode_pb2.Cancel(ticket="t"))
        assert end_reason_from_proto((await session.hear()).reason) is EndReason.CANCELLED
        session.close()
        await suite.assert_all_free()
