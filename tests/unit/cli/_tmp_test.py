import asyncio
from pathlib import Path
import pytest
from pdserve.testing import Cluster
from tests.tiny_models import make_tiny_model


async def test_cluster(tmp_path):
    m = make_tiny_model(tmp_path / "tiny")
    async with Cluster(
        m, prefill=1, decode=1, dtype="float32", per_worker={"decode-0": {"kv-cache-memory": 32 << 20}}
    ) as c:
        a = await c.client.complete("hello", max_tokens=8, temperature=0.0)
        assert len(a.tokens) and sorted(c.workers) == ["decode-0", "prefill-0"]
        await c.assert_all_free()
        await c.kill("prefill-0")
        b = await c.client.complete("hello", max_tokens=8, temperature=0.0)
        assert b.token_ids == a.token_ids
        await c.assert_all_free()
