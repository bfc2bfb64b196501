"""Clients that leave in every moment of a request, by the thousand."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from pdserve.client import Client
from pdserve.launch import ModelPart
from tests.integration.suites import prompt, serve
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow

REQUESTS, SECONDS = 2000, 60.0
LONGEST = 1.5  # seconds until a client leaves; an answer to its end takes about as long
FREE_WITHIN = 5.0  # seconds after the last one left: a frame in flight may take a lease


async def test_2000_cancelled_requests_leave_nothing_behind(tmp_path: Path) -> None:
    part = ModelPart(make_tiny_model(tmp_path / "model"), "tiny", prefill=1, decode=2)
    async with serve(tmp_path / "logs", part, prefix_caches=1) as cluster, Client(cluster.endpoint) as client:
        expected = await client.complete(prompt(200), max_tokens=16, temperature=0, ignore_eos=True)
        whole = await asyncio.gather(*(_leave(client, number) for number in range(REQUESTS)))
        await cluster.assert_all_free(FREE_WITHIN)
        assert REQUESTS / 100 < sum(whole) < REQUESTS / 2, "some ended by themselves, most were left"
        again = await client.complete(prompt(200), max_tokens=16, temperature=0, ignore_eos=True)
        assert again.token_ids == expected.token_ids


async def _leave(client: Client, number: int) -> bool:
    """Begin one request in its time, and leave it. True where it was complete by then."""
    chance = random.Random(number)
    await asyncio.sleep(SECONDS * number / REQUESTS)  # the load's own pace
    tokens = prompt(chance.randrange(10, 400), seed=number)
    try:
        async with asyncio.timeout(LONGEST * chance.random() ** 2):
            await client.complete(tokens, max_tokens=chance.randrange(1, 200), ignore_eos=True, timeout=60.0)
    except TimeoutError:
        return False
    return True
