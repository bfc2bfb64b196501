"""One Prefill call: what is told of its end, however it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from pdserve.core.errors import Unavailable
from pdserve.router.attempt import start_prefill
from pdserve.router.events import Event, PrefillFailed
from pdserve.router.ledger import Ledger, Work
from pdserve.rpc.channel import connect
from pdserve.v1 import prefill_pb2, prefill_pb2_grpc

PATIENCE = 5.0


class Silent(prefill_pb2_grpc.PrefillServiceServicer):
    """Takes a prompt, and never says anything about it."""

    def __init__(self) -> None:
        self.called = asyncio.Event()

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        self.called.set()
        await asyncio.Event().wait()
        yield prefill_pb2.PrefillResponse()


async def test_a_call_that_is_given_up_before_it_began_leaves_nothing_in_the_books() -> None:
    ledger, events = Ledger(), list[Event]()
    async with connect("127.0.0.1:1") as channel, asyncio.timeout(PATIENCE):
        request = prefill_pb2.PrefillRequest(ticket="t", attempt=1)
        call = start_prefill(channel, request, None, ledger.add(Work(1)), events.append)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    assert call.cancelled() and ledger.sequences == 0 and not events


@pytest.mark.parametrize("told", [True, False])
async def test_a_call_that_ends_with_its_channel_has_failed(told: bool) -> None:
    """A worker that is silent for a lease loses its connection, and the request must hear of it; but not of the end
    that it made itself."""
    silent, server = Silent(), grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(silent, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    events: list[Event] = []
    ledger = Ledger()
    async with connect(f"127.0.0.1:{port}") as channel, asyncio.timeout(PATIENCE):
        request = prefill_pb2.PrefillRequest(ticket="t", attempt=1)
        call = start_prefill(channel, request, None, ledger.add(Work(1)), events.append)
        await silent.called.wait()
        if not told:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(call, return_exceptions=True)
    await server.stop(0)
    assert ledger.sequences == 0
    if not told:
        assert call.cancelled() and not events
        return
    (failed,) = events
    assert isinstance(failed, PrefillFailed) and failed.lost and isinstance(failed.error, Unavailable)
