"""A ticket's prefill half."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from pdserve.core.sampling import SamplingParams
from pdserve.core.sequence import SequenceSpec
from pdserve.policy.routing import Decision, Kind
from pdserve.router.assignment import Assignment
from pdserve.router.events import PrefillFailed
from pdserve.router.ticket import Ticket
from pdserve.rpc.channel import connect


async def test_a_worker_whose_connection_ended_since_it_was_found_has_failed() -> None:
    channel = connect("127.0.0.1:1")
    await channel.close()
    worker = cast(Any, SimpleNamespace(worker_id="prefill-0", channel=channel))
    assignment = Assignment(Decision(Kind.PREFILL_ONLY, ""), worker, None, None, None)
    spec = SequenceSpec("r", (1, 2, 3), 3, SamplingParams())
    async with Ticket(assignment, spec, "ticket") as ticket, asyncio.timeout(5.0):
        ((_, _, event),) = await ticket.next_events()
    assert isinstance(event, PrefillFailed) and "prefill-0" in str(event.error)
