"""One fleet for many: tenants, routers side by side, and what becomes of requests when nobody is up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdserve.core.errors import Unavailable
from pdserve.policy.disaggregation import NoWorker
from pdserve.router.dispatch import DOWN_RETRY
from tests.integration.router_suite import PATIENCE, Suite, pair, suite, tokenizer_only
from tests.integration.scripted_worker import ScriptedWorker, Wire


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_only(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize("rule, waits", [("fail", 0.0), ("wait", 0.2)])
async def test_without_a_decode_worker_a_request_ends_when_the_rules_say(folder: Path, rule: str, waits: float) -> None:
    prefill, decode = pair()
    async with suite(folder, prefill, decode, no_worker=NoWorker(rule), no_worker_seconds=0.2) as made:
        await decode.die()
        await made.until(lambda: sum(worker.connected for worker in made.fleet.workers) == 1)
        began = asyncio.get_running_loop().time()
        asked = [made.client.complete("hi", timeout=PATIENCE) for _ in range(3)]
        for error in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(error, Unavailable) and "no decode worker is up" in str(error), error
            assert error.retry_after == DOWN_RETRY
        assert asyncio.get_running_loop().time() - began >= waits


async def test_without_a_prefill_worker_decode_workers_compute_where_the_rules_say(folder: Path) -> None:
    prefill, decode = pair()
    async with suite(folder, prefill, decode, no_worker=NoWorker.LOCAL) as made:
        await prefill.die()
        await made.until(lambda: sum(worker.connected for worker in made.fleet.workers) == 1)
        done = await made.client.complete("hi")
        assert (done.text, done.finish.usage.prefill_worker) == ("hello", "d0")
        one = await made.client.complete("hi", max_tokens=1, timeout=PATIENCE)
        assert (one.text, one.finish.usage.prefill_worker) == ("h", "d0")


async def test_a_tenant_that_floods_waits_behind_itself(folder: Path) -> None:
    """One tenant fills the worker and the queue; another one's request takes the next place that becomes free."""
    step = asyncio.Event()
    decode = ScriptedWorker("d0", "decode", Wire(), step=step)
    ended: list[str] = []

    async def ask(made: Suite, tenant: str) -> None:
        await made.client.complete("hi", tenant=tenant, timeout=PATIENCE)
        ended.append(tenant)

    async with suite(folder, decode) as made, asyncio.TaskGroup() as tasks:
        for _ in range(40):
            tasks.create_task(ask(made, "flood"))
        model = made.service.waiting
        await made.until(lambda: len(decode.seen) == 8 and model("tiny") == 32)
        tasks.create_task(ask(made, "quiet"))
        await made.until(lambda: model("tiny") == 33)
        step.set()
    assert ended.index("quiet") <= 16, "it was behind more than those that ran before it came and those beside it"


async def test_two_routers_never_oversubscribe_a_worker(folder: Path) -> None:
    """500 requests at once through two routers that don't know of each other: a worker's word is the truth, and whoever
    is refused is placed elsewhere."""
    wire = Wire()
    workers = [ScriptedWorker(f"d{number}", "decode", wire, seats=8) for number in range(6)]
    async with suite(folder, *workers) as one, suite(folder, *workers, own_workers=False) as two:
        asked = [
            router.client.complete("hi", max_tokens=3, seed=number, timeout=60)
            for number in range(250)
            for router in (one, two)
        ]
        done = await asyncio.gather(*asked)
        assert {answer.text for answer in done} == {"hel"} and len(done) == 500
        assert all(worker.most <= 8 for worker in workers)
        counts = [worker.served for worker in workers]
        assert max(counts) <= 1.3 * sum(counts) / len(counts), counts
