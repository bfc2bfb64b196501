"""Clients that leave in every moment of a request, by the thousand."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from pathlib import Path

import pytest

from pdserve.client import Client, Output
from pdserve.launch import ModelPart
from tests.integration.suites import prompt, serve
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow

REQUESTS, SECONDS = 2000, 60.0
SOON = 0.05  # seconds until a client leaves that waits for no token
FREE_WITHIN = 5.0  # seconds after the last one left: a frame in flight may take a lease


async def test_2000_cancelled_requests_leave_nothing_behind(tmp_path: Path) -> None:
    part = ModelPart(make_tiny_model(tmp_path / "model"), "tiny", prefill=1, decode=2)
    async with serve(tmp_path / "logs", part, prefix_caches=1) as cluster, Client(cluster.endpoint) as client:
        expected = await client.complete(prompt(200), max_tokens=16, temperature=0, ignore_eos=True)
        whole = await asyncio.gather(*(_leave(client, number) for number in range(REQUESTS)))
        await cluster.assert_all_free(FREE_WITHIN)
        assert REQUESTS / 10 < sum(whole) < REQUESTS / 2, "some were read to their end, most were left"
        again = await client.complete(prompt(200), max_tokens=16, temperature=0, ignore_eos=True)
        assert again.token_ids == expected.token_ids


async def _leave(client: Client, number: int) -> bool:
    """Begin one request in its time, and leave it: before anything came, or after some tokens. True where these were
    all of them."""
    chance = random.Random(number)
    await asyncio.sleep(SECONDS * number / REQUESTS)  # the load's own pace
    most, left = chance.randrange(1, 200), 0 if chance.random() < 0.3 else chance.randrange(1, 250)
    tokens = prompt(chance.randrange(10, 400), seed=number)
    async with client.generate(tokens, max_tokens=most, ignore_eos=True, timeout=60.0) as events:
        if not left:
            with suppress(TimeoutError):
                async with asyncio.timeout(chance.random() * SOON):
                    async for _ in events:
                        pass
            return False
        seen = 0
        async for event in events:
            seen += len(event.tokens) if isinstance(event, Output) else 0
            if seen >= min(left, most):
                break
    return left >= most
