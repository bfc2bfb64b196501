"""What the front knows of a ticket that lives in a router's session."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pdserve.core.sequence import EndReason, SequenceSpec
from pdserve.telemetry.tracing import Span
from pdserve.worker.router_session import RouterSession


@dataclass(eq=False, slots=True)
class Ticket:
    """A ticket from Submit until the engine's Ended; `attempt`, `spec` and `peer` are those of its newest attempt.

    Times are wall-clock nanoseconds, 0: not yet.
    """

    id: str
    attempt: int
    spec: SequenceSpec
    peer: str | None
    session: RouterSession
    submitted_ns: int
    reserved_ns: int = 0
    ready_ns: int = 0
    stepping_ns: int = 0  # the beginning of the step that made the first token here
    kv_bytes: int = 0
    tokens: int = 0
    # Open while the prompt is computed here.
    prefill: Span | None = None
    # Why the ticket ends, where this front knows better than the engine that is told to end it.
    verdict: tuple[EndReason, str] | None = None
    # What runs before the engine hears of the ticket: the fetch of a prompt that is computed here.
    preparing: asyncio.Task[None] | None = None
