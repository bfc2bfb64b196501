"""Real workers, scraped as Prometheus would: what moved is counted on both sides, and every alert has its metrics."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from pdserve.launch import ModelPart
from pdserve.rpc.channel import connect
from pdserve.rpc.versions import our_versions
from pdserve.testing import Cluster
from pdserve.v1 import worker_pb2
from pdserve.v1.worker_pb2_grpc import WorkerServiceStub
from tests.integration.suites import CHUNK, prompt, serve
from tests.tiny_models import make_tiny_model

ALERTS = Path(__file__).resolve().parents[2] / "docker" / "prometheus" / "alerts.yml"
ANY_PORT = {"metrics-port": 0}
TOKENS = 2 * CHUNK + 1


async def scrape(cluster: Cluster, worker: str) -> dict[str, float]:
    """Values by name and labels: "pdserve_blocks{state=free}"."""
    url = cluster.workers[worker].details["metrics"]

    def read() -> str:
        with urllib.request.urlopen(url, timeout=10) as response:
            text: str = response.read().decode()
        return text

    found = {}
    for family in text_string_to_metric_families(await asyncio.to_thread(read)):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


async def scrape_until(cluster: Cluster, worker: str, until: Callable[[dict[str, float]], Any]) -> dict[str, float]:
    """Scrape each time the worker speaks, until its metrics are as `until` wants them: reports come with a delay."""
    found: dict[str, float] = {}
    async with connect(cluster.workers[worker].endpoint) as channel:
        call = WorkerServiceStub(channel).Watch(worker_pb2.WatchRequest(protocol=our_versions()))
        try:
            async with asyncio.timeout(30):
                async for _ in call:
                    found = await scrape(cluster, worker)
                    if until(found):
                        return found
        except TimeoutError:
            pass
        finally:
            call.cancel()
    raise AssertionError(f"{worker} never reported what was waited for: {found}")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    part = ModelPart(make_tiny_model(tmp_path / "model"), "tiny", prefill=1, decode=1)
    async with serve(tmp_path / "logs", part, per_worker={"prefill-0": ANY_PORT, "decode-0": ANY_PORT}) as cluster:
        yield cluster


async def test_what_moved_is_counted_on_both_sides(cluster: Cluster) -> None:
    before = await scrape(cluster, "prefill-0")
    assert before["pdserve_kv_transfer_bytes_total{direction=sent}"] == 0
    assert before["pdserve_blocks{state=free}"] > 0
    for seed in range(2):
        await cluster.client.complete(prompt(TOKENS, seed), max_tokens=4, ignore_eos=True)
    [prefill] = [worker for worker in await cluster.client.fleet() if worker.role == "prefill"]
    moved = 2 * TOKENS * prefill.kv_token_bytes

    def sent(found: dict[str, float]) -> bool:
        return found["pdserve_kv_transfer_bytes_total{direction=sent}"] >= moved

    found = await scrape_until(
        cluster, "prefill-0", lambda found: sent(found) and found["pdserve_kv_transfers_total"] == 2
    )
    assert found["pdserve_kv_transfer_bytes_total{direction=sent}"] == moved
    assert found["pdserve_kv_produced_bytes_total"] == moved
    assert found["pdserve_kv_transfer_frames_total{direction=sent}"] > 0
    assert found["pdserve_kv_transfer_seconds_count"] == 2
    assert 0 <= found["pdserve_kv_transfer_exposed_seconds_sum"] <= found["pdserve_kv_transfer_seconds_sum"]
    assert found["pdserve_kv_transfer_seconds_sum"] > 0
    links = {name: value for name, value in found.items() if name.startswith("pdserve_kv_links{")}
    assert links == {"pdserve_kv_links{path=loopback,transport=gloo}": 1} and found["pdserve_kv_links_degraded"] == 0
    assert found["pdserve_kv_link_capacity_bytes_per_second"] > 0, "links are measured as they come up"
    assert found["pdserve_kv_link_credit_bytes"] > 0 and found["pdserve_kv_threads_abandoned"] == 0

    received = "pdserve_kv_transfer_bytes_total{direction=received}"
    theirs = await scrape_until(cluster, "decode-0", lambda found: found[received] >= moved)
    assert theirs[received] == moved
    assert theirs["pdserve_worker_info{model=tiny,role=decode,worker_id=decode-0}"] == 1

    exposed = {name.partition("{")[0] for name in found}
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            assert set(re.findall(r"\bpdserve_\w+", rule["expr"])) <= exposed, rule["alert"]


async def test_workers_without_a_port_export_nothing(tmp_path: Path) -> None:
    part = ModelPart(make_tiny_model(tmp_path / "model"), "tiny", colocated=1)
    async with serve(tmp_path / "logs", part) as cluster:
        assert "metrics" not in cluster.workers["decode-0"].details
