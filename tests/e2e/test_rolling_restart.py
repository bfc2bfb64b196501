"""Every service of a suite is restarted, one after the other, under load."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos_fleet import ChaosFleet
from pdserve.client import Client
from pdserve.testing import wait_all_free
from tests.integration.suites import prompt
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KINDS, LANES, ANSWER = 6, 8, 600
DEADLINE = 300.0  # seconds; services start slowly on a busy machine
AGAIN = 8


def request(kind: int) -> tuple[list[int], dict[str, Any]]:
    """Prompt and options, half of them greedy."""
    options: dict[str, Any] = {"max_tokens": ANSWER, "ignore_eos": True, "timeout": DEADLINE, "temperature": 0.0}
    if kind % 2:
        options |= {"temperature": 0.8, "seed": kind, "frequency_penalty": 0.3}
    return prompt(60 + 31 * kind, seed=kind), options


async def complete(client: Client, kind: int) -> tuple[int, ...]:
    tokens, options = request(kind)
    return tuple((await client.complete(tokens, **options)).token_ids)


class Load:
    """Answers, some at a time, until it is enough. What is lost raises."""

    def __init__(self, client: Client) -> None:
        self.answers: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self._client = client
        self._enough = False
        self._news = asyncio.Event()
        self._lanes = [asyncio.create_task(self._lane(number)) for number in range(LANES)]

    async def more(self) -> None:
        """Wait for another answer."""
        self._news.clear()
        news = asyncio.create_task(self._news.wait())
        await asyncio.wait({news, *self._lanes}, timeout=DEADLINE, return_when=asyncio.FIRST_COMPLETED)
        for lane in self._lanes:
            if lane.done():
                lane.result()
        assert news.done(), "no answer came"

    async def end(self) -> None:
        self._enough = True
        await asyncio.gather(*self._lanes)

    async def _lane(self, kind: int) -> None:
        while not self._enough:
            kind = (kind + 1) % KINDS
            self.answers[kind, await complete(self._client, kind)] += 1
            self._news.set()


async def runs_something(client: Client, name: str) -> None:
    """Return while the worker `name` has answers under way."""
    async with asyncio.timeout(DEADLINE):
        while not any(worker.running for worker in await client.fleet() if worker.worker_id == name):
            pass


async def test_a_rolling_restart_under_load_loses_nothing(tmp_path: Path) -> None:
    """Each service ends with 0, every answer comes whole, as an undisturbed run gives it, and nothing stays owned."""
    model, logs = make_tiny_model(tmp_path / "model"), tmp_path / "logs"
    logs.mkdir()
    fleet = ChaosFleet(model, logs, "--hand-off", "all", log_level="info")
    async with fleet, Client(fleet.routers) as client:
        expected = [await complete(client, kind) for kind in range(KINDS)]
        load = Load(client)
        await load.more()
        for member in fleet.members:
            if member.name.startswith("decode"):  # else its answers may all have ended together just now
                await runs_something(client, member.name)
            assert await fleet.restart(member) == 0, member.name
            await load.more()
        await load.end()
        await asyncio.gather(*(wait_all_free(endpoint) for endpoint in fleet.workers))
        for (kind, tokens), _ in load.answers.items():
            assert len(tokens) == ANSWER
            if tokens != expected[kind]:
                # Sums depend on who shares a batch, so that a near tie may fall either way; then it does so again.
                again = await asyncio.gather(*(complete(client, kind) for _ in range(AGAIN)))
                assert tokens in again
    routers = [json.loads(line) for path in logs.glob("router-*.log") for line in path.read_text().splitlines()]
    told = Counter(record["event"] for record in routers)
    assert told["handed_off"] > 0
