"""Metrics come over HTTP from a registry of their own, and a port that is taken is a clear error."""

from __future__ import annotations

import asyncio
import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client import REGISTRY

from pdserve.core.errors import ConfigError
from pdserve.telemetry.metrics import CollectorRegistry, counter, gauge, histogram
from pdserve.telemetry.metrics_server import MAX_SCRAPES, MetricsServer


def read(endpoint: str) -> str:
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=5) as response:
        text: str = response.read().decode()
    return text


class Fixed:
    def describe(self) -> list[object]:
        return []

    def collect(self) -> list[object]:
        totals = {("sent",): 3.0, ("received",): 0.0}
        return [counter("things_total", "Things.", totals, ["direction"]), gauge("level", "Level.", 0.5)]


async def test_a_registry_is_served_until_its_scope_ends() -> None:
    registry = CollectorRegistry()
    registry.register(Fixed())  # type: ignore[arg-type]
    histogram(registry, "wait_seconds", "Waits.", (0.1, 1.0)).observe(0.5)
    async with MetricsServer(registry, "127.0.0.1", 0) as server:
        text = await asyncio.to_thread(read, server.endpoint)
    lines = text.splitlines()
    assert 'pdserve_things_total{direction="sent"} 3.0' in lines and "pdserve_level 0.5" in lines
    assert 'pdserve_wait_seconds_bucket{le="0.1"} 0.0' in lines and "pdserve_wait_seconds_sum 0.5" in lines
    assert "python_info" not in text  # which the library's own registry has
    assert not any(name.startswith("pdserve") for name in REGISTRY._names_to_collectors)
    with pytest.raises(OSError):
        await asyncio.to_thread(read, server.endpoint)


async def test_only_metrics_are_here() -> None:
    async with MetricsServer(CollectorRegistry(), "127.0.0.1", 0) as server:
        for path in ("", "/", "/favicon.ico", "/metrics/", "/metrics/../etc/passwd"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                await asyncio.to_thread(urllib.request.urlopen, f"http://{server.endpoint}{path}", timeout=5)
            with refused.value as answer:
                assert (answer.code, answer.read()) == (404, b"only /metrics is here\n")
        assert await asyncio.to_thread(read, server.endpoint) == ""


async def test_clients_that_say_nothing_hold_up_only_so_many_threads() -> None:
    async with MetricsServer(CollectorRegistry(), "127.0.0.1", 0) as server:
        host, _, port = server.endpoint.rpartition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(MAX_SCRAPES)]
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
            assert await asyncio.wait_for(reader.read(), 5) == b"", "one too many: hung up on"
            writer.close()
        finally:
            for _, writer in silent:
                writer.close()


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            async with MetricsServer(CollectorRegistry(), "127.0.0.1", port):
                pass


async def test_ipv6_addresses_are_bracketed() -> None:
    try:
        async with MetricsServer(CollectorRegistry(), "::1", 0) as server:
            assert server.endpoint.startswith("[::1]:")
            assert await asyncio.to_thread(read, server.endpoint) == ""
    except ConfigError as error:
        pytest.skip(str(error))


def test_a_counter_is_called_total() -> None:
    with pytest.raises(ValueError, match="_total"):
        counter("things", "Things.", 1)
