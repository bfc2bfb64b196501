"""Why a request went where it went, told by live routers; and `pdserve explain` on them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from pdserve.client import Client, DecisionKind, Explanation, LocalReason, RequestState, SyncClient
from pdserve.core.errors import UnknownRequest
from pdserve.launch import ModelPart
from pdserve.rpc.errors import RpcError
from tests.integration.scraping import scrape
from tests.integration.suites import BLOCK, CHUNK, LONG_ENOUGH, LONG_MODEL, prompt, serve
from tests.tiny_models import make_tiny_model


async def cli(*arguments: str) -> tuple[int, str, str]:
    """Run the command with its output in a pipe."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdserve.cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(os.environ),
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def until(client: Client, request_id: str, there: Callable[[Explanation], object]) -> Explanation:
    """The explanation once it is as `there` wants it: the router tells of no decision by itself."""
    async with asyncio.timeout(60):
        while True:
            with suppress(UnknownRequest):  # it has not arrived yet
                found = await client.explain(request_id)
                if there(found):
                    return found


def over(found: Explanation) -> bool:
    return found.request.state is not RequestState.RUNNING


async def test_a_placement_is_explained_with_what_else_there_was_and_what_came_of_it(tmp_path: Path) -> None:
    part = ModelPart(make_tiny_model(tmp_path / "model", "llama"), "tiny", prefill=1, decode=2)
    async with serve(tmp_path / "logs", part, metrics=True) as cluster:
        client = cluster.client
        for seed in range(6):  # until the workers know how fast they are
            await client.complete(prompt(2 * CHUNK, seed), max_tokens=12, ignore_eos=True)
        await client.complete(
            prompt(2 * CHUNK, 5) + prompt(CHUNK, 9),
            max_tokens=6,
            ignore_eos=True,
            request_id="asked",
            slo_ttft_ms=20_000.0,
        )
        found = await until(client, "asked", over)
        assert (found.request.request_id, found.request.state) == ("asked", RequestState.DONE)
        [decision] = found.decisions
        assert found.deciding is decision and decision.kind is DecisionKind.REMOTE and decision.tokens == 3 * CHUNK
        assert (decision.ttft_target_ms, decision.targets_stated) == (20_000.0, True)
        assert (decision.prefill_worker, decision.decode_worker) == found.request.workers
        best = decision.chosen
        assert best is not None and (best.prefill_worker, best.decode_worker) == found.request.workers
        assert len({(c.prefill_worker, c.decode_worker) for c in decision.candidates}) == len(decision.candidates)
        assert {c.decode_worker for c in decision.candidates} == {"decode-0", "decode-1"}
        assert decision.considered == 2 and f"of {decision.considered}" in decision.reason
        assert best.cached_tokens == decision.cached_tokens == 2 * CHUNK, "they were there since the sixth"
        assert best.measured and best.compute_ms > 0 and best.gap_ms > 0
        assert found.ttft_ms is not None and found.request.ttft_ms is not None
        assert 0 < found.ttft_ms <= found.request.ttft_ms, "the wait before it is not part of it"
        assert found.request.arrived_ns <= decision.first_ns == decision.last_ns

        # The blocking client sees the same, and so does a terminal.
        with SyncClient(cluster.endpoint) as blocking:
            assert await asyncio.to_thread(blocking.explain, "asked") == found
        with pytest.raises(UnknownRequest, match="never-was"):
            await client.explain("never-was")
        code, out, err = await cli("explain", "asked", "--target", cluster.endpoint)
        assert code == 0 and out.isascii(), err
        for word in ("request asked, tiny", "as asked for", "> ", "decode-0", "decode-1", "predicted", decision.reason):
            assert word in " ".join(out.split())
        code, out, _ = await cli("explain", "asked", "--json", "--target", cluster.endpoint)
        assert code == 0 and json.loads(out)["decisions"][-1]["considered"] == decision.considered
        code, out, err = await cli("explain", "nobody", "--target", cluster.endpoint)
        assert (code, out) == (1, "") and "nobody" in err

        # The trace carries it, and the metrics have counted it.
        trace = await client.trace("asked")
        [root] = [
            span for span in trace.spans if span.service == "router" and "pdserve.routing.kind" in span.attributes
        ]
        assert root.attributes["pdserve.routing.reason"] == decision.reason
        assert root.attributes["pdserve.routing.candidates"] == decision.considered
        metrics = await scrape(cluster, "router")
        assert metrics["pdserve_routing_decisions_total{kind=remote,model_name=tiny}"] == 7
        assert metrics["pdserve_routing_ttft_ratio_count{model_name=tiny}"] >= 1


async def test_a_wait_is_one_decision_however_long_it_lasts(tmp_path: Path) -> None:
    part = ModelPart(make_tiny_model(tmp_path / "model", "llama", **LONG_MODEL), "tiny", prefill=1, decode=1)
    seats = {"decode-0": {"max-num-seqs": 1}}
    async with serve(tmp_path / "logs", part, per_worker=seats) as cluster:
        client = cluster.client
        async with client.generate(prompt(20), max_tokens=LONG_ENOUGH, ignore_eos=True) as events:
            for _ in range(3):
                await anext(events)
            second = asyncio.create_task(
                client.complete(prompt(20, 1), max_tokens=2, ignore_eos=True, request_id="second")
            )
            waiting = await until(client, "second", lambda found: found.decisions and found.decisions[0].count > 1)
            [decision] = waiting.decisions
            assert (decision.kind, waiting.request.state) == (DecisionKind.WAIT, RequestState.RUNNING)
            assert "room" in decision.reason and waiting.deciding is None
            code, out, _ = await cli("explain", "second", "--target", cluster.endpoint)
            assert code == 0 and "running" in out and "waited" in out and "(x " in out
        await second
        found = await until(client, "second", over)
        waited, *_, placed = found.decisions
        assert waited.kind is DecisionKind.WAIT and waited.count >= decision.count and placed.placed
        assert waited.last_ns <= placed.first_ns and placed.waited_ms >= waited.waited_ms


async def test_a_decode_worker_that_computes_prompts_says_why(tmp_path: Path) -> None:
    part = ModelPart(make_tiny_model(tmp_path / "model", "llama"), "tiny", colocated=1)
    async with serve(tmp_path / "logs", part) as cluster:
        await cluster.client.complete(prompt(4 * BLOCK + 1), max_tokens=2, ignore_eos=True, request_id="alone")
        await cluster.client.complete(prompt(4 * BLOCK + 1), max_tokens=2, ignore_eos=True, request_id="again")
        for request_id, why, cached in (
            ("alone", LocalReason.NO_PREFILL_WORKERS, 0),
            ("again", LocalReason.HELD, 4 * BLOCK),
        ):
            [decision] = (await until(cluster.client, request_id, over)).decisions
            assert (decision.kind, decision.local_reason) == (DecisionKind.LOCAL, why)
            assert (decision.prefill_worker, decision.decode_worker) == ("", "decode-0")
            assert decision.cached_tokens == cached
            assert not decision.targets_stated


async def test_without_a_ring_nothing_can_be_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_TRACE_RING", "0")
    part = ModelPart(make_tiny_model(tmp_path / "model", "llama"), "tiny", colocated=1)
    async with serve(tmp_path / "logs", part) as cluster:
        await cluster.client.complete(prompt(5), max_tokens=2, request_id="a")
        with pytest.raises(RpcError, match="--trace-ring 0"):
            await cluster.client.explain("a")
