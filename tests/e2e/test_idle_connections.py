"""10,000 clients that connect and ask for nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.processes import resident_bytes
from pdserve.client import Client
from pdserve.launch import ModelPart
from tests.integration.idlers import descriptors, idling
from tests.integration.suites import complete_over_http, prompt, serve
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow

IDLE = 10_000
EACH = 40 << 10  # bytes of a process's memory for each of its connections, in and out of use
WITHIN = 30.0  # seconds for an answer beside them, on a machine that is busy
USUAL = 1024  # descriptors, as most systems give to a process that does not ask for more


@pytest.mark.parametrize(
    ("service", "http2"),
    [
        pytest.param("router", False, id="router, silent"),
        pytest.param("router", True, id="router, HTTP/2"),
        pytest.param("gateway", False, id="gateway"),
    ],
)
async def test_10000_idle_connections_leave_room_and_cost_little(tmp_path: Path, service: str, http2: bool) -> None:
    """Twice, one wave after the other: the second would not fit beside the first, so that one must be gone."""
    part = ModelPart(make_tiny_model(tmp_path / "model"), "tiny", colocated=1)
    suite = serve(tmp_path / "logs", part, gateways=1)
    with descriptors(USUAL):
        await suite.__aenter__()
    try:
        with descriptors(IDLE + USUAL):
            process = suite.suite.router if service == "router" else suite.suite.gateways[0]
            assert process is not None
            before = resident_bytes(process.pid)
            for _ in range(2):
                async with idling(process.endpoint, IDLE, http2=http2) as idlers:
                    grown = resident_bytes(process.pid) - before
                    async with asyncio.timeout(WITHIN), Client(suite.endpoint) as newcomer:
                        await newcomer.complete(prompt(20), max_tokens=4, ignore_eos=True)
                        await suite.client.complete(prompt(20, 1), max_tokens=4, ignore_eos=True)
                        await complete_over_http(suite, prompt(20, 2), 4)
                    if http2:  # silent ones are closed after a while
                        assert not any(idler.closed.done() for idler in idlers), "none was refused"
                print(f"{service}: {grown / IDLE:.0f} bytes for each of {IDLE} connections")
                assert grown < EACH * IDLE
            await suite.assert_all_free()
    finally:
        await suite.__aexit__(None, None, None)
