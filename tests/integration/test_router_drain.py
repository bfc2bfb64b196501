"""A router moves what runs on a decode worker that is going to stop, against workers that agree, refuse and die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdserve.router.leaving import MOVES
from tests.integration.router_suite import PATIENCE, Suite, suite, tokenizer_only
from tests.integration.scripted_worker import ScriptedWorker, Wire


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_only(tmp_path_factory.mktemp("model") / "tiny")


class Drain:
    """An answer that stands after two tokens, on the worker that is going to stop."""

    def __init__(self, made: Suite, old: ScriptedWorker, new: ScriptedWorker, asking: asyncio.Task[Any]) -> None:
        self.made, self.old, self.new, self.asking = made, old, new, asking

    def happened(self, *lines: str) -> bool:
        return self.old.wire.log[-len(lines) :] == list(lines)


@asynccontextmanager
async def draining(folder: Path, hand_off: str = "all") -> AsyncIterator[Drain]:
    wire, step = Wire(), asyncio.Event()
    prefill = ScriptedWorker("p0", "prefill", wire)
    workers = {name: ScriptedWorker(name, "decode", wire, step=step) for name in ("d0", "d1")}
    async with suite(folder, prefill, *workers.values(), hand_off=hand_off) as made:
        seen = asyncio.Event()
        tokens: list[int] = []

        async def ask() -> Any:
            answer = None
            async with made.client.generate("hi", timeout=4 * PATIENCE) as events:
                async for event in events:
                    tokens.extend(getattr(event, "token_ids", ()))
                    if len(tokens) >= 2:
                        seen.set()
                    answer = event
            assert bytes(tokens[:5]) == b"hello" and len(tokens) == 6, tokens
            return answer

        asking = asyncio.create_task(ask())
        async with asyncio.timeout(PATIENCE):
            await seen.wait()
        old = next(worker for worker in workers.values() if worker.seen)
        new = next(worker for worker in workers.values() if worker is not old)
        new.step = None
        yield Drain(made, old, new, asking)
        step.set()
        await made.until(made.no_accounts_open)


async def test_it_goes_on_with_the_next_token(folder: Path) -> None:
    """The other worker is given what was shown but for the last token, which comes with the KV; nobody computes it."""
    async with draining(folder) as drain:
        await drain.old.drain(60)
        finish = await drain.asking
        old, new = drain.old.worker_id, drain.new.worker_id
        assert drain.happened(f"{old} hands off to {new}", f"{new} rearm 2 by {old}", f"{new} rearmed 2")
        assert [bytes(spec.token_ids) for spec in (*drain.new.seen, *drain.new.rearmed)] == [b"hih", b"hih"]
        assert (finish.usage.replays, finish.usage.prefill_worker, finish.usage.decode_worker) == (0, "p0", new)
        assert len(drain.old.seen) == 1


async def test_nothing_is_moved_where_that_is_off(folder: Path) -> None:
    async with draining(folder, "off") as drain:
        await drain.old.drain(60)
        await drain.made.until(lambda: any(worker.draining for worker in drain.made.fleet.workers))
        assert drain.old.step is not None
        drain.old.step.set()
        assert (await drain.asking).usage.decode_worker == drain.old.worker_id
        assert drain.new.seen == []


@pytest.mark.parametrize("how", ["refuse", "transfer_failed"])
async def test_where_the_other_worker_fails_it_stays(folder: Path, how: str) -> None:
    """After some tries, each of which was called off."""
    async with draining(folder) as drain:
        drain.new.script.extend([how] * MOVES)
        drain.old.hand_offs.extend(["fail"] * MOVES)  # so that it does not stop meanwhile
        await drain.old.drain(60)
        await drain.made.until(lambda: len(drain.new.seen) == MOVES)
        assert drain.old.step is not None
        drain.old.step.set()
        finish = await drain.asking
        assert (finish.usage.replays, finish.usage.decode_worker) == (0, drain.old.worker_id)


async def test_where_its_own_worker_cannot_it_stays(folder: Path) -> None:
    async with draining(folder) as drain:
        drain.old.hand_offs.extend(["fail"] * MOVES)
        await drain.old.drain(60)
        await drain.made.until(lambda: len(drain.new.cancelled) == MOVES)
        assert drain.old.step is not None
        drain.old.step.set()
        finish = await drain.asking
        assert (finish.usage.replays, finish.usage.decode_worker) == (0, drain.old.worker_id)


async def test_a_sequence_that_was_stopped_goes_on_where_the_other_worker_refuses_the_rest(folder: Path) -> None:
    async with draining(folder) as drain:
        drain.new.rearms.append("refuse")
        drain.new.script.extend(["serve", *["refuse"] * MOVES])
        await drain.old.drain(60)
        finish = await drain.asking
        assert f"{drain.old.worker_id} goes on" in drain.old.wire.log
        assert (finish.usage.replays, finish.usage.decode_worker) == (0, drain.old.worker_id)


async def test_where_both_let_it_down_it_is_replayed(folder: Path) -> None:
    """Its own worker dies once it has stopped it, and the other one waits for KV in vain."""
    async with draining(folder) as drain:
        drain.old.hand_offs.append("die")
        drain.new.rearms.append("hold refuse")
        await drain.old.drain(60)
        await drain.made.until(lambda: sum(worker.connected for worker in drain.made.fleet.workers) == 2)
        drain.new.gate.set()
        finish = await drain.asking
        assert (finish.usage.replays, finish.usage.decode_worker) == (1, drain.new.worker_id)
