"""Cluster, the fixture for everybody's tests: real processes, a client, and workers that can be killed."""

from __future__ import annotations

from pathlib import Path

from pdserve.testing import Cluster
from tests.tiny_models import make_tiny_model


async def test_a_cluster_answers_survives_a_kill_and_owes_nothing(tmp_path: Path) -> None:
    """The same greedy tokens with one of two prefill workers gone, and every block is free or cached after each."""
    model = make_tiny_model(tmp_path / "tiny")
    flags = {"decode-0": {"max-num-seqs": 8}}
    async with Cluster(model, prefill=2, decode=1, dtype="float32", per_worker=flags) as cluster:
        assert sorted(cluster.workers) == ["decode-0", "prefill-0", "prefill-1"]
        before = await cluster.client.complete("hello", max_tokens=8, temperature=0.0)
        await cluster.assert_all_free()
        await cluster.kill("prefill-0")
        after = await cluster.client.complete("hello", max_tokens=8, temperature=0.0)
        await cluster.assert_all_free()
        assert before.token_ids == after.token_ids
        assert cluster.suite.failure is None
