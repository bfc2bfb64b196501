"""Real services, scraped as Prometheus would: what moved is counted on both sides, and where a request's time went."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from pdserve.client import Output
from pdserve.core.errors import InvalidRequest, UnknownModel
from pdserve.core.slo import Verdict
from pdserve.launch import ModelPart
from pdserve.rpc.channel import connect
from pdserve.rpc.errors import error_from_call
from pdserve.testing import Cluster
from pdserve.v1 import inference_pb2
from pdserve.v1.inference_pb2_grpc import InferenceServiceStub
from tests.integration.scraping import Found, scrape, scrape_until
from tests.integration.suites import CHUNK, complete_over_http, prompt, serve
from tests.otlp_receiver import OtlpReceiver
from tests.tiny_models import make_tiny_model

TOKENS = 2 * CHUNK + 1


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    part = ModelPart(make_tiny_model(tmp_path / "model"), "tiny", prefill=1, decode=1)
    async with serve(tmp_path / "logs", part, metrics=True) as cluster:
        yield cluster


async def test_what_moved_is_counted_on_both_sides(cluster: Cluster) -> None:
    before = await scrape(cluster, "prefill-0")
    assert before["pdserve_kv_transfer_bytes_total{direction=sent}"] == 0
    assert before["pdserve_blocks{state=free}"] > 0
    for seed in range(2):
        await cluster.client.complete(prompt(TOKENS, seed), max_tokens=4, ignore_eos=True)
    [prefill] = [worker for worker in await cluster.client.fleet() if worker.role == "prefill"]
    moved = 2 * TOKENS * prefill.kv_token_bytes

    def sent(found: Found) -> bool:
        return found["pdserve_kv_transfer_bytes_total{direction=sent}"] >= moved

    capacity = "pdserve_kv_link_capacity_bytes_per_second"  # links are measured as they come up, beside what they carry

    def settled(found: Found) -> bool:
        return sent(found) and found["pdserve_kv_transfers_total"] == 2 and found[capacity] > 0

    found = await scrape_until(cluster, "prefill-0", settled)
    assert found["pdserve_kv_transfer_bytes_total{direction=sent}"] == moved
    assert found["pdserve_kv_produced_bytes_total"] == moved
    assert found["pdserve_kv_transfer_frames_total{direction=sent}"] > 0
    assert found["pdserve_kv_transfer_seconds_count"] == 2
    assert 0 <= found["pdserve_kv_transfer_exposed_seconds_sum"] <= found["pdserve_kv_transfer_seconds_sum"]
    assert found["pdserve_kv_transfer_seconds_sum"] > 0
    links = {name: value for name, value in found.items() if name.startswith("pdserve_kv_links{")}
    assert links == {"pdserve_kv_links{path=loopback,transport=gloo}": 1} and found["pdserve_kv_links_degraded"] == 0
    assert found["pdserve_kv_link_credit_bytes"] > 0 and found["pdserve_kv_threads_abandoned"] == 0

    received = "pdserve_kv_transfer_bytes_total{direction=received}"
    theirs = await scrape_until(cluster, "decode-0", lambda found: found[received] >= moved)
    assert theirs[received] == moved
    assert theirs["pdserve_worker_info{model_name=tiny,role=decode,worker_id=decode-0}"] == 1


async def test_workers_without_a_port_export_nothing(tmp_path: Path) -> None:
    part = ModelPart(make_tiny_model(tmp_path / "model"), "tiny", colocated=1)
    async with serve(tmp_path / "logs", part) as cluster:
        assert cluster.metrics == {}


# What the router's clients see.

FIRST = ("queue", "reserve", "prefill")
THEN = ("transfer_exposed", "decode_wait", "first_step")


def summed(found: Found, name: str, stages: tuple[str, ...], what: str) -> list[float]:
    return [found[f"pdserve_{name}_{what}{{model_name=tiny,stage={stage}}}"] for stage in stages]


async def test_stages_sum_to_the_time_to_first_token_and_to_the_first_gap(cluster: Cluster) -> None:
    """Of real requests: every one has two tokens, so the first gap is the only one; the last has just one token."""
    told = []
    for seed in range(4):
        done = await cluster.client.complete(prompt(TOKENS, seed), max_tokens=2, ignore_eos=True)
        told.append(done.finish.usage.stages)
    await cluster.client.complete(prompt(CHUNK, 9), max_tokens=1, ignore_eos=True)
    found = await scrape(cluster, "router")
    ttft = found["pdserve_time_to_first_token_seconds_sum{model_name=tiny}"]
    assert sum(summed(found, "request_stage_seconds", FIRST, "sum")) == pytest.approx(ttft, abs=1e-9)
    gaps = found["pdserve_inter_token_latency_seconds_sum{model_name=tiny}"]
    assert sum(summed(found, "request_stage_seconds", THEN, "sum")) == pytest.approx(gaps, abs=1e-9)
    assert summed(found, "request_stage_seconds", FIRST, "count") == [5, 5, 5]
    assert summed(found, "request_stage_seconds", THEN, "count") == [4, 4, 4]
    assert found["pdserve_time_to_first_token_seconds_count{model_name=tiny}"] == 5
    assert found["pdserve_inter_token_latency_seconds_count{model_name=tiny}"] == 4
    assert all(stages.prefill_ms > 0 and stages.first_step_ms > 0 for stages in told)
    first_steps = sum(stages.first_step_ms for stages in told) / 1e3
    assert found["pdserve_request_stage_seconds_sum{model_name=tiny,stage=first_step}"] == pytest.approx(first_steps)


async def test_every_gap_and_every_outcome_is_counted(cluster: Cluster) -> None:
    client = cluster.client
    await client.complete(prompt(CHUNK), max_tokens=9, ignore_eos=True)
    async with client.generate(prompt(CHUNK, 1), max_tokens=200, ignore_eos=True) as events:
        async for event in events:
            if isinstance(event, Output):
                break  # and leaves: a cancel
    with pytest.raises(InvalidRequest):
        await client.complete(prompt(CHUNK), max_tokens=2, temperature=-1.0)
    with pytest.raises(UnknownModel):
        await client.complete("hi", model="made up by a client")

    def ended(found: Found) -> bool:
        return found["pdserve_requests_total{model_name=tiny,outcome=cancelled}"] == 1

    found = await scrape_until(cluster, "router", ended)
    outcomes = {name: value for name, value in found.items() if name.startswith("pdserve_requests_total") and value}
    assert outcomes == {
        "pdserve_requests_total{model_name=tiny,outcome=length}": 1,
        "pdserve_requests_total{model_name=tiny,outcome=cancelled}": 1,
        "pdserve_requests_total{model_name=tiny,outcome=invalid_argument}": 1,
        "pdserve_requests_total{model_name=,outcome=not_found}": 1,
    }
    tokens = found["pdserve_generation_tokens_total{model_name=tiny}"]
    assert tokens == 2 + found["pdserve_inter_token_latency_seconds_count{model_name=tiny}"] >= 9
    assert found["pdserve_prompt_tokens_total{model_name=tiny}"] == 2 * CHUNK
    assert found["pdserve_request_generation_tokens_sum{model_name=tiny}"] == 9
    genai = "gen_ai_operation_name=text_completion,gen_ai_provider_name=pdserve,gen_ai_request_model=tiny"
    assert found[f"gen_ai_server_time_to_first_token_seconds_count{{{genai}}}"] == 1, "of successful responses only"
    assert found[f"gen_ai_server_request_duration_seconds_count{{error_type=cancelled,{genai}}}"] == 1
    assert found["pdserve_router_num_requests_running{model_name=tiny}"] == 0
    assert found["pdserve_workers{model_name=tiny,role=decode,state=connected}"] == 1
    assert "made up" not in " ".join(found), "a client must not choose labels"


async def test_each_request_is_judged_by_the_targets_it_was_promised(cluster: Cluster) -> None:
    async with connect(cluster.endpoint) as channel:
        stub = InferenceServiceStub(channel)
        for targets, tokens in (
            ((6e4, 6e4), 3),
            ((1e-3, 6e4), 3),
            ((6e4, 1e-6), 3),
            ((1e-3, 1e-6), 3),
            ((6e4, 1e-6), 1),
        ):
            await ask(stub, slo=inference_pb2.SloTargets(ttft_ms=targets[0], itl_ms=targets[1]), max_tokens=tokens)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(stub, slo=inference_pb2.SloTargets(ttft_ms=-1), max_tokens=1)
    assert isinstance(error_from_call(refused.value), InvalidRequest)
    assert "slo.ttft_ms" in str(error_from_call(refused.value))
    found = await scrape(cluster, "router")
    verdicts = {
        verdict: found[f"pdserve_slo_requests_total{{model_name=tiny,verdict={verdict}}}"] for verdict in Verdict
    }
    assert verdicts == {"met": 2, "missed_ttft": 1, "missed_itl": 1, "missed_both": 1, "failed": 0}
    assert found["pdserve_slo_target_seconds{target=ttft}"] == 0.5
    assert found["pdserve_slo_itl_percentile"] == 99


async def ask(stub: InferenceServiceStub, slo: inference_pb2.SloTargets, max_tokens: int) -> None:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt(CHUNK)),
        stopping=inference_pb2.StoppingOptions(max_tokens=max_tokens, ignore_eos=True),
        slo=slo,
    )
    call = stub.Generate(request)
    async for _ in call:
        pass


async def test_workers_tell_how_busy_they_are_and_what_their_caches_are_worth(cluster: Cluster) -> None:
    """Two prompts with the same first chunk: the second time it is found, and only the rest computed."""
    same = prompt(CHUNK)
    for seed in (1, 2):
        await cluster.client.complete(same + prompt(CHUNK + 1, seed), max_tokens=4, ignore_eos=True)

    def told(found: Found) -> bool:
        return found["pdserve_engine_sampled_tokens_total"] == 2

    prefill = await scrape_until(cluster, "prefill-0", told)
    assert prefill["pdserve_prefix_cache_queries_total"] == 2 * TOKENS
    assert prefill["pdserve_prefix_cache_hits_total"] == CHUNK
    assert prefill["pdserve_engine_tokens_total"] == 2 * TOKENS - CHUNK
    assert prefill["pdserve_engine_busy_seconds_total"] > 0 and prefill["pdserve_engine_steps_total"] == 5
    assert prefill["pdserve_request_prefill_time_seconds_count"] == 2
    decode = await scrape_until(cluster, "decode-0", lambda found: found["pdserve_engine_sampled_tokens_total"] == 6)
    assert decode["pdserve_engine_steps_total"] == 6 and decode["pdserve_kv_cache_usage_perc"] == 0
    assert decode["pdserve_engine_busy_seconds_total"] > 0


async def test_every_service_sends_its_metrics_over_otlp(tmp_path: Path) -> None:
    part = ModelPart(make_tiny_model(tmp_path / "model"), "tiny", prefill=1, decode=1)
    with OtlpReceiver() as receiver:
        async with serve(tmp_path / "logs", part, prefix_caches=1, gateways=1, otlp_endpoint=receiver.endpoint) as made:
            await made.client.complete(prompt(CHUNK), max_tokens=3, ignore_eos=True)
            await complete_over_http(made, prompt(CHUNK, 1), max_tokens=3)
        expected = {
            "router": {"pdserve_time_to_first_token_seconds", "gen_ai.server.time_to_first_token", "pdserve_requests"},
            "prefill": {"pdserve_kv_transfer_bytes", "pdserve_worker_info", "pdserve_engine_busy_seconds"},
            "decode": {"pdserve_kv_transfer_bytes", "pdserve_blocks"},
            "prefix_cache": {"pdserve_prefix_store_bytes"},
            "gateway": {"pdserve_gateway_requests"},
        }
        for service, names in expected.items():
            assert names <= receiver.names(f"pdserve-{service}"), service
        points = [p for m, _, p in receiver.series("pdserve-router") if m.name == "gen_ai.server.time_to_first_token"]
        assert [point.count for point in points] == [2]
        assert receiver.tracers() == {f"pdserve-{service}" for service in expected}, "traces go there as well"
