"""The front's part in handing sequences off: commands to the engine, its answers to the router, and links meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.decode.ticket import Ticket
from pdserve.rpc.endpoint import check_endpoint
from pdserve.v1 import decode_pb2
from pdserve.worker.front import WorkerFront
from pdserve.worker.messages import CallOff, Detached, HandOff, HandOffFailed

log = structlog.get_logger(__name__)

MAX_ATTEMPT = 1 << 16  # there are two to each ticket; on the wire it is a uint32


class HandOffs:
    """The hand-offs of one worker. Each keeps the link that it needs: decode workers have none to each other before."""

    def __init__(self, front: WorkerFront) -> None:
        self._front = front
        self._links: dict[str, tuple[str, asyncio.Task[None]]] = {}  # by ticket: its new one, and what keeps the link

    def begin(self, ticket: Ticket, wanted: decode_pb2.HandOff) -> None:
        """Have the engine move a sequence, or say why not."""
        try:
            self._check(ticket, wanted)
        except InvalidRequest as error:
            self._tell_failed(ticket, wanted.new_ticket, str(error))
            return
        peer, new_ticket = wanted.decode_worker_id, wanted.new_ticket
        self._log("handing_off", ticket, new_ticket=new_ticket, peer=peer, tokens=wanted.tokens)
        link = self._link(ticket.id, new_ticket, wanted.decode_endpoint, peer)
        self._links[ticket.id] = new_ticket, asyncio.create_task(link, name=f"link to hand off {ticket.id}")
        self._front.engine.send(HandOff(ticket.id, new_ticket, wanted.attempt, peer, wanted.tokens))

    def call_off(self, ticket: Ticket, new_ticket: str) -> None:
        """Have the engine go on with a sequence."""
        self._log("hand_off_called_off", ticket, new_ticket=new_ticket)
        self._drop_link(ticket, new_ticket)
        self._front.engine.send(CallOff(ticket.id, new_ticket))

    def on_message(self, ticket: Ticket, message: Detached | HandOffFailed) -> None:
        """Hand on what the engine says."""
        if isinstance(message, HandOffFailed):
            self._drop_link(ticket, message.new_ticket)
            self._tell_failed(ticket, message.new_ticket, message.reason)
            return
        detached = decode_pb2.Detached(ticket=ticket.id, new_ticket=message.new_ticket, tokens=message.tokens)
        ticket.session.put(decode_pb2.SessionResponse(detached=detached))

    def ended(self, ticket: Ticket) -> None:
        """A ticket is over, handed off or not."""
        if (found := self._links.get(ticket.id)) is not None:
            self._drop_link(ticket, found[0])

    def _check(self, ticket: Ticket, wanted: decode_pb2.HandOff) -> None:
        if ticket.id in self._links:
            raise InvalidRequest("ticket", "is being handed off already")
        self._front.check_ticket(wanted.new_ticket)
        check_endpoint(wanted.decode_endpoint, "decode_endpoint")
        if wanted.decode_worker_id in ("", self._front.worker_id):
            raise InvalidRequest("decode_worker_id", "must be another worker")
        if wanted.attempt > MAX_ATTEMPT:
            raise InvalidRequest("attempt", f"must be at most {MAX_ATTEMPT}")

    async def _link(self, ticket_id: str, new_ticket: str, endpoint: str, peer: str) -> None:
        """Have the link up, and open it again where it ends too early."""
        try:
            while True:
                await self._front.links.open(endpoint, peer)
                await self._front.links.ended(peer)
        except PdserveError as error:
            self._front.engine.send(CallOff(ticket_id, new_ticket, f"no link to {peer}: {error}"))

    def _drop_link(self, ticket: Ticket, new_ticket: str) -> None:
        """A hand-off is over: the link is not kept up for it any more. Words about an older one change nothing."""
        found = self._links.get(ticket.id)
        if found is not None and found[0] == new_ticket:
            found[1].cancel()
            del self._links[ticket.id]

    def _tell_failed(self, ticket: Ticket, new_ticket: str, reason: str) -> None:
        failed = decode_pb2.HandOffFailed(ticket=ticket.id, new_ticket=new_ticket, reason=reason)
        self._log("hand_off_failed", ticket, new_ticket=new_ticket, reason=reason)
        ticket.session.put(decode_pb2.SessionResponse(hand_off_failed=failed))

    def _log(self, event: str, ticket: Ticket, **details: Any) -> None:
        log.info(event, ticket=ticket.id, request_id=ticket.spec.request_id, **details)
