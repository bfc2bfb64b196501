"""What the services of a Cluster export, read as Prometheus would."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from pdserve.rpc.channel import connect
from pdserve.rpc.versions import our_versions
from pdserve.testing import Cluster
from pdserve.v1 import worker_pb2
from pdserve.v1.worker_pb2_grpc import WorkerServiceStub

Found = dict[str, float]


async def read(url: str) -> str:
    """A page, as text."""

    def fetch() -> str:
        with urllib.request.urlopen(url, timeout=10) as response:
            text: str = response.read().decode()
        return text

    return await asyncio.to_thread(fetch)


def values(text: str) -> Found:
    """Values by name and labels: "pdserve_blocks{state=free}"."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


async def scrape(cluster: Cluster, service: str) -> Found:
    return values(await read(cluster.metrics[service]))


async def heartbeats(cluster: Cluster, worker: str) -> AsyncIterator[None]:
    """Comes whenever a worker speaks: at least once a second, and for ever."""
    async with connect(cluster.workers[worker].endpoint, cluster.access) as channel:
        call = WorkerServiceStub(channel).Watch(worker_pb2.WatchRequest(protocol=our_versions()))
        try:
            async for _ in call:
                yield
        finally:
            call.cancel()


async def scrape_until(cluster: Cluster, service: str, until: Callable[[Found], Any], timeout: float = 30.0) -> Found:
    """Scrape each time a worker speaks, until the metrics are as `until` wants them: reports come with a delay."""
    found: Found = {}
    worker = service if service in cluster.workers else next(iter(cluster.workers))
    try:
        async with asyncio.timeout(timeout), aclosing(heartbeats(cluster, worker)) as beats:
            async for _ in beats:
                found = await scrape(cluster, service)
                if until(found):
                    return found
    except TimeoutError:
        pass
    raise AssertionError(f"{service} never reported what was waited for: {found}")
