"""A ticket's prefill half."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdserve.core.sampling import SamplingParams
from pdserve.core.sequence import SequenceSpec
from pdserve.policy.routing import Decision, Kind
from pdserve.router.assignment import Assignment
from pdserve.router.events import PrefillFailed
from pdserve.router.prefill_session import PrefillSession
from pdserve.router.ticket import Ticket
from pdserve.rpc.channel import connect


@pytest.mark.parametrize("found", ["open", "closed"])
async def test_a_worker_whose_connection_ended_since_it_was_found_has_failed(found: str) -> None:
    """Nothing was sent there, so that it is not this request that the worker was lost under."""
    async with connect("127.0.0.1:1") as channel:
        session = PrefillSession(channel, "router-0", 1.0)
        session.close("connection to prefill-0 lost")
        worker = cast(Any, SimpleNamespace(worker_id="prefill-0", prefills=session if found == "open" else None))
        assignment = Assignment(Decision(Kind.PREFILL_ONLY, ""), worker, None, None, None)
        spec = SequenceSpec("r", (1, 2, 3), 3, SamplingParams())
        async with Ticket(assignment, spec, "ticket") as ticket, asyncio.timeout(5.0):
            ((_, _, event),) = await ticket.next_events()
        assert isinstance(event, PrefillFailed) and "prefill-0" in str(event.error) and not event.lost
