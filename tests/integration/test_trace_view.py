"""One request's trace, gathered from live processes without a collector; and `pdserve trace` and `top` on them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.client import Client, RequestState, SyncClient, Trace
from pdserve.core.errors import UnknownRequest
from pdserve.core.trace import TraceSpan, arrange
from pdserve.launch import ModelPart
from pdserve.rpc.errors import RpcError
from pdserve.testing import Cluster
from tests.integration.suites import CHUNK, LONG_ENOUGH, LONG_MODEL, prompt, serve
from tests.tiny_models import make_tiny_model

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
PAUSE = 0.05  # seconds
STAGES = ("queue", "reserve", "prefill", "transfer", "decode_wait", "first_step")


def suite(folder: Path, decode: int = 1, **options: Any) -> Cluster:
    part = ModelPart(make_tiny_model(folder / "model", "llama", **LONG_MODEL), "tiny", prefill=1, decode=decode)
    return serve(folder / "logs", part, prefix_caches=1, **options)


async def cli(*arguments: str) -> tuple[int, str, str]:
    """Run the command with its output in a pipe."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdserve.cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "100"},
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


Parts = set[tuple[str, str]]  # (service, span)


async def until(client: Client, request_id: str, lacking: Callable[[Trace], Parts], seconds: float = 60.0) -> Trace:
    """The trace once it lacks nothing: services end their parts a moment after the client has its answer.

    No service reports that a span is over, so the router is asked again, with a pause: each time it asks them all.
    """
    trace = None
    try:
        async with asyncio.timeout(seconds):
            while True:
                trace = await client.trace(request_id)
                if not lacking(trace):
                    return trace
                await asyncio.sleep(PAUSE)
    except TimeoutError:
        if trace is None:
            raise TimeoutError(f"no trace of {request_id} came within {seconds} s") from None
        raise TimeoutError(
            f"{request_id} lacks {sorted(lacking(trace))} after {seconds} s; it is {trace.request.state}, "
            f"there were {sorted(present(trace))} from {trace.sources}"
        ) from None


def present(trace: Trace) -> Parts:
    return {(span.service, name(span)) for span in trace.spans}


def ended(*parts: tuple[str, str]) -> Callable[[Trace], Parts]:
    """Which of (service, span) are not there."""
    return lambda trace: set(parts) - present(trace)


def over(trace: Trace) -> Parts:
    """The router's part, as long as the request runs."""
    return {("router", "its end")} if trace.request.state is RequestState.RUNNING else set()


def name(span: TraceSpan) -> str:
    return span.name.removeprefix("pdserve.")


def of(trace: Trace, service: str, wanted: str) -> TraceSpan:
    [found] = [span for span in trace.spans if span.service == service and name(span) == wanted]
    return found


async def test_a_handed_over_request_is_seen_on_every_service(tmp_path: Path) -> None:
    async with suite(tmp_path) as cluster:
        client = cluster.client
        done = await client.complete(
            prompt(2 * CHUNK + 1),
            max_tokens=6,
            ignore_eos=True,
            request_id="handed-over",
            traceparent=f"00-{TRACE_ID}-{CALLER}-00",
        )
        trace = await until(client, "handed-over", ended(("prefill", "transfer"), ("decode", "decode")))

        request, usage = trace.request, done.finish.usage
        assert (request.trace_id, request.state, request.usage) == (TRACE_ID, RequestState.DONE, usage)
        assert request.workers == ("prefill-0", "decode-0") and request.itl.count == 5
        stages = usage.stages
        assert request.ttft_ms == pytest.approx(stages.queue_ms + stages.reserve_ms + stages.prefill_ms)

        # The router's stages lie end to end and are what the client was told.
        router = {name(span): span for span in trace.spans if span.service == "router"}
        at = router["queue"].start_ns
        for stage in STAGES:
            told = getattr(stages, {"transfer": "transfer_exposed"}.get(stage, stage) + "_ms")
            assert (stage in router) == (told > 0)
            if stage in router:
                span = router[stage]
                assert (span.end_ns - span.start_ns) / 1e6 == pytest.approx(told, abs=1e-3)
                assert span.start_ns == at
                at = span.end_ns

        # Everything hangs on the request's span, in its place, and within what it is part of.
        [root] = [row.span for row in arrange(trace.spans) if row.depth == 0]
        assert (root.service, root.parent_span_id) == ("router", CALLER)
        prefill, decode = of(trace, "prefill", "prefill"), of(trace, "decode", "decode")
        chunks = [span for span in trace.spans if name(span) == "prefill.chunk"]
        assert [chunk.attributes["pdserve.tokens"] for chunk in chunks] == [CHUNK, CHUNK, 1]
        fetch, lookup = of(trace, "prefill", "prefix.fetch"), of(trace, "prefix_cache", "prefix.lookup")
        waited = of(trace, "prefill", "prefill.queue")
        for child, parent in [
            *((chunk, prefill) for chunk in chunks),
            (waited, prefill),
            (fetch, prefill),
            (lookup, fetch),
            (of(trace, "decode", "reserve"), root),
            (of(trace, "decode", "receive"), root),
            (of(trace, "prefill", "transfer"), root),
            (prefill, root),
            (decode, root),
        ]:
            assert child.parent_span_id == parent.span_id
            assert parent.start_ns <= child.start_ns <= child.end_ns
        assert fetch.end_ns <= waited.end_ns <= chunks[0].start_ns < chunks[-1].end_ns <= prefill.end_ns
        assert of(trace, "decode", "receive").end_ns <= decode.start_ns
        assert decode.attributes["pdserve.tokens"] == 5
        moved = of(trace, "prefill", "transfer")
        assert moved.attributes["pdserve.kv_bytes"] == usage.kv_transfer_bytes
        assert chunks[0].start_ns <= moved.start_ns

        # Who was asked, and that one machine's clocks agree.
        assert {source.worker_id or source.service for source in trace.sources} == {
            *("router", "prefill-0", "decode-0", "prefix-cache-0")
        }
        assert not any(source.missing or source.dropped or source.moved for source in trace.sources)
        assert {span.worker_id for span in trace.spans} == {"", "prefill-0", "decode-0", "prefix-cache-0"}

        # The blocking client sees the same, and what nobody knows is said.
        with SyncClient(cluster.endpoint) as blocking:
            again = await asyncio.to_thread(blocking.trace, "handed-over")
            assert set(again.spans) == set(trace.spans)
            assert [r.request_id for r in await asyncio.to_thread(blocking.traces)] == ["handed-over"]
        with pytest.raises(UnknownRequest, match="never-was"):
            await client.trace("never-was")

        # And in a terminal.
        code, out, _ = await cli("trace", "handed-over", "--target", cluster.endpoint)
        assert code == 0
        for word in ("prefill.chunk", "prefill-0", "decode-0", "prefix-cache-0", "first token", "129 in", CALLER):
            assert word in out
        code, out, _ = await cli("trace", "handed-over", "--json", "--target", cluster.endpoint)
        assert code == 0 and json.loads(out)["request"]["trace_id"] == TRACE_ID
        code, out, err = await cli("trace", "--target", cluster.endpoint)
        assert code == 0 and "handed-over" in out and "pdserve trace handed-over" in err
        code, out, err = await cli("trace", "nobody", "--target", cluster.endpoint)
        assert (code, out) == (1, "") and "nobody" in err


async def test_a_prompt_is_seen_where_it_is_decoded_too(tmp_path: Path) -> None:
    part = ModelPart(make_tiny_model(tmp_path / "model", "llama"), "tiny", colocated=1)
    async with serve(tmp_path / "logs", part, prefix_caches=1) as cluster:
        await cluster.client.complete(prompt(2 * CHUNK + 1), max_tokens=3, ignore_eos=True, request_id="one")
        trace = await until(cluster.client, "one", ended(("decode", "decode")))
        prefill = of(trace, "decode", "prefill")
        chunks = [span for span in trace.spans if name(span) == "prefill.chunk"]
        assert [chunk.attributes["pdserve.tokens"] for chunk in chunks] == [CHUNK, CHUNK, 1]
        for chunk in chunks:
            assert (chunk.parent_span_id, chunk.worker_id) == (prefill.span_id, "decode-0")
            assert prefill.start_ns <= chunk.start_ns <= chunk.end_ns <= prefill.end_ns
        assert of(trace, "prefix_cache", "prefix.lookup").parent_span_id == of(trace, "decode", "prefix.fetch").span_id
        assert trace.request.workers == ("decode-0",)


async def test_a_running_request_has_an_open_span(tmp_path: Path) -> None:
    async with suite(tmp_path) as cluster:
        client = cluster.client
        async with client.generate(prompt(20), max_tokens=LONG_ENOUGH, ignore_eos=True, request_id="runs") as events:
            await anext(events)
            await anext(events)
            trace = await client.trace("runs")
            assert trace.request.state is RequestState.RUNNING and trace.request.usage.prompt_tokens == 20
            [root] = [span for span in trace.spans if span.service == "router" and not span.end_ns]
            assert any(row.depth == 1 for row in arrange(trace.spans)), "what is over hangs on it already"
            assert [model.running for model in (await client.stats()).models] == [1]
        trace = await until(client, "runs", over)
        assert trace.request.state is RequestState.CANCELLED
        assert [span.end_ns > 0 for span in trace.spans if span.span_id == root.span_id] == [True]


async def test_a_worker_that_died_is_named_as_missing_and_the_replay_is_seen(tmp_path: Path) -> None:
    async with suite(tmp_path, decode=2) as cluster:
        async with cluster.client.generate(
            prompt(40), max_tokens=2000, ignore_eos=True, request_id="replayed"
        ) as events:
            shown, finish = 0, None
            async for event in events:
                shown += 1
                if shown == 4:
                    running = await cluster.client.trace("replayed")
                    [victim] = [worker for worker in running.request.workers if worker.startswith("decode")]
                    await cluster.kill(victim)
                finish = event
        trace = await until(cluster.client, "replayed", ended(("decode", "decode")))
        assert trace.request.usage.replays == 1 and trace.request.usage == finish.usage  # type: ignore[union-attr]
        [gone] = [source for source in trace.sources if source.missing]
        assert gone.worker_id == victim and gone.spans == 0
        assert not any(span.worker_id == victim for span in trace.spans)
        [failed] = [span for span in trace.spans if name(span) == "try"]
        assert failed.failed and failed.error and failed.attributes["pdserve.worker"] == victim
        code, out, _ = await cli("trace", "replayed", "--target", cluster.endpoint)
        assert code == 0 and f"! {victim} is missing" in out and "! try" in out
        code, out, _ = await cli("top", "--once", "--interval", "0.1", "--json", "--target", cluster.endpoint)
        states = {worker["worker_id"]: worker["connected"] for worker in json.loads(out)["fleet"]}
        assert code == 0 and states[victim] is False and sum(states.values()) == 3


async def test_top_shows_the_fleet_after_traffic(tmp_path: Path) -> None:
    async with suite(tmp_path) as cluster:
        requests = [
            cluster.client.complete(prompt(CHUNK + 1, seed), max_tokens=4, ignore_eos=True) for seed in range(5)
        ]
        await asyncio.gather(*requests)
        async with asyncio.timeout(30):
            while not any(worker.links for worker in await cluster.client.fleet()):
                pass  # workers tell of their links once a second
        code, out, err = await cli("top", "--once", "--interval", "0.2", "--json", "--target", cluster.endpoint)
        assert code == 0, err
        view = json.loads(out)
        [model] = view["stats"]["models"]
        assert (model["model"], model["completed"], model["running"], model["waiting"]) == ("tiny", 5, 0, 0)
        assert (model["ttft"]["count"], model["itl"]["count"], model["queue"]["count"]) == (5, 15, 5)
        assert 0 < model["ttft"]["p50_ms"] <= model["ttft"]["p99_ms"] <= model["ttft"]["max_ms"]
        assert model["output_tokens_per_second"] > 0 and model["prompt_tokens_per_second"] > 0
        roles = {worker["worker_id"]: worker["role"] for worker in view["fleet"]}
        assert roles == {"prefill-0": "prefill", "decode-0": "decode", "prefix-cache-0": "prefix_cache"}
        assert set(view["rates"]) == set(roles)
        # In a pipe: one view, plain.
        code, out, err = await cli("top", "--interval", "0.2", "--target", cluster.endpoint)
        assert code == 0 and out.isascii(), err
        for word in ("tiny", "first token", "between tokens", "prefill: 1 of 1 up", "decode: 1 of 1 up", "loopback"):
            assert word in out
        assert max(map(len, out.splitlines())) <= 160


async def test_without_a_ring_there_are_no_traces_and_everything_else_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_TRACE_RING", "0")
    part = ModelPart(make_tiny_model(tmp_path / "model", "llama"), "tiny", colocated=1)
    async with serve(tmp_path / "logs", part) as cluster:
        await cluster.client.complete(prompt(5), max_tokens=2, request_id="a")
        assert await cluster.client.traces() == []
        with pytest.raises(RpcError, match="--trace-ring 0"):
            await cluster.client.trace("a")
        assert (await cluster.client.stats()).models[0].completed == 1


async def test_a_wait_in_vain_says_what_was_missing_and_what_was_there(tmp_path: Path) -> None:
    part = ModelPart(make_tiny_model(tmp_path / "model", "llama"), "tiny", colocated=1)
    async with serve(tmp_path / "logs", part) as cluster:
        await cluster.client.complete(prompt(5), max_tokens=2, request_id="a")
        await until(cluster.client, "a", ended(("decode", "decode")))
        wanted = ended(("decode", "decode"), ("prefill", "transfer"))
        with pytest.raises(TimeoutError, match=r"a lacks \[\('prefill', 'transfer'\)\].*\('decode', 'decode'\)"):
            await until(cluster.client, "a", wanted, seconds=0.5)


async def test_top_without_a_router_says_so() -> None:
    code, out, err = await cli("top", "--once", "--target", "127.0.0.1:9")
    assert (code, out) == (1, "") and "nothing answers there" in err
