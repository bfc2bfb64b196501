"""A prefill worker's attempt gives back what it holds, however it is ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from pdserve.core.sampling import SamplingParams
from pdserve.core.sequence import SequenceSpec
from pdserve.prefill.service import PrefillServicer
from pdserve.rpc.convert import spec_to_proto
from pdserve.v1 import prefill_pb2
from pdserve.worker.messages import CancelTicket, StartPrefill
from pdserve.worker.router_session import RouterSession


class SlowLinks:
    """Their opening takes its time to end, too."""

    def __init__(self) -> None:
        self.ending, self.ended = asyncio.Event(), asyncio.Event()

    async def open(self, endpoint: str, peer: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.ending.set()
            await self.ended.wait()


async def test_an_attempt_that_is_cancelled_twice_cancels_its_ticket() -> None:
    """As when its session ends and then the call that carried it, while its link is still being let go."""
    sent: list[Any] = []
    started, links = asyncio.Event(), SlowLinks()

    def start(message: StartPrefill) -> None:
        sent.append(message)
        started.set()

    front = SimpleNamespace(
        require_open=lambda: None, check_ticket=lambda ticket: None, check=lambda spec: None, worker_id="p0",
        links=links, prefix=None, start_prefill=start, engine=SimpleNamespace(send=sent.append),
    )  # fmt: skip
    servicer = PrefillServicer(cast(Any, front))
    sequence = spec_to_proto(SequenceSpec("r", (1, 2), 2, SamplingParams(max_tokens=4)))
    request = prefill_pb2.PrefillRequest(
        ticket="t", attempt=1, sequence=sequence, decode_worker_id="d0", decode_endpoint="127.0.0.1:1"
    )
    attempt = asyncio.create_task(servicer._prefill(cast(Any, RouterSession()), request))
    await started.wait()
    await asyncio.sleep(0)
    attempt.cancel()
    await links.ending.wait()
    attempt.cancel()
    await asyncio.wait({attempt})
    links.ended.set()
    assert [type(message) for message in sent] == [StartPrefill, CancelTicket]
