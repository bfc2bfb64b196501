"""This router's shared stream to one decode worker: commands up, events down to each ticket's sink."""

from __future__ import annotations

import asyncio

import grpc.aio

from pdserve.core.errors import Unavailable
from pdserve.core.sequence import SequenceSpec
from pdserve.router.events import (
    AlreadyReady,
    AttemptFailed,
    Detached,
    Draining,
    Ended,
    HandOffFailed,
    Lost,
    NewToken,
    Ready,
    Rearmed,
    Reserved,
    SessionEvent,
    Sink,
)
from pdserve.router.tasks import until_first_ends
from pdserve.rpc.convert import end_reason_from_proto, spec_to_proto
from pdserve.rpc.versions import our_versions
from pdserve.v1 import decode_pb2, decode_pb2_grpc


class DecodeSession:
    """One session. Whoever opens it runs `run` until it raises, and must `close` it: that tells every ticket."""

    def __init__(self, channel: grpc.aio.Channel, router_id: str, patience: float) -> None:
        """`patience`, in seconds, bounds the handshake and each write."""
        self.worker_id = ""
        self.incarnation = ""
        self._call = decode_pb2_grpc.DecodeServiceStub(channel).Session()
        self._router_id = router_id
        self._patience = patience
        self._sinks: dict[str, Sink] = {}
        self._commands: asyncio.Queue[decode_pb2.SessionRequest] = asyncio.Queue()
        self._closed: str | None = None
        self._draining = False

    async def open(self) -> None:
        """Greet the worker. Raises Unavailable or grpc's error."""
        hello = decode_pb2.SessionHello(protocol=our_versions(), router_id=self._router_id)
        async with asyncio.timeout(self._patience):
            await self._call.write(decode_pb2.SessionRequest(hello=hello))
            answer = await self._call.read()
        if not isinstance(answer, decode_pb2.SessionResponse) or not answer.HasField("welcome"):
            raise Unavailable("the decode worker did not welcome the session")
        self.worker_id, self.incarnation = answer.welcome.worker_id, answer.welcome.incarnation

    async def run(self) -> None:
        """Carry commands and events until the stream ends, which raises."""
        await until_first_ends(self._read(), self._write())

    def submit(self, ticket: str, attempt: int, spec: SequenceSpec, prefill_worker_id: str, sink: Sink) -> None:
        """Ask for a reservation. Its events go to `sink` until Ended, Lost or `cancel`."""
        if self._closed is not None:
            sink(Lost(self._closed))
            return
        self._sinks[ticket] = sink
        submit = decode_pb2.Submit(
            ticket=ticket, attempt=attempt, sequence=spec_to_proto(spec), prefill_worker_id=prefill_worker_id
        )
        self._commands.put_nowait(decode_pb2.SessionRequest(submit=submit))

    def rearm(self, ticket: str, attempt: int, spec: SequenceSpec, prefill_worker_id: str) -> None:
        """Ask for a new attempt into the reservation: Rearmed, AlreadyReady or the ticket's end will follow. Nothing
        does where the ticket has ended: its sink knows."""
        if ticket not in self._sinks:
            return
        rearm = decode_pb2.Rearm(
            ticket=ticket, attempt=attempt, prefill_worker_id=prefill_worker_id, sequence=spec_to_proto(spec)
        )
        self._commands.put_nowait(decode_pb2.SessionRequest(rearm=rearm))

    def hand_off(self, ticket: str, new_ticket: str, attempt: int, worker_id: str, endpoint: str, tokens: int) -> None:
        """Have a running sequence moved to another worker, which has reserved it as `new_ticket`: Detached or
        HandOffFailed will follow, or the ticket's end."""
        if ticket not in self._sinks:
            return
        hand_off = decode_pb2.HandOff(
            ticket=ticket,
            new_ticket=new_ticket,
            attempt=attempt,
            decode_worker_id=worker_id,
            decode_endpoint=endpoint,
            tokens=tokens,
        )
        self._commands.put_nowait(decode_pb2.SessionRequest(hand_off=hand_off))

    def call_off(self, ticket: str, new_ticket: str) -> None:
        """Have a sequence that is being moved go on where it is. No event follows."""
        if ticket in self._sinks:
            called_off = decode_pb2.CallOff(ticket=ticket, new_ticket=new_ticket)
            self._commands.put_nowait(decode_pb2.SessionRequest(call_off=called_off))

    def cancel(self, ticket: str) -> None:
        """End a ticket, if it has not ended. No event follows."""
        if self._sinks.pop(ticket, None) is not None and self._closed is None:
            self._commands.put_nowait(decode_pb2.SessionRequest(cancel=decode_pb2.Cancel(ticket=ticket)))
            self._settle()

    def close(self, reason: str) -> None:
        """End the stream and every ticket on it. May be called again."""
        if self._closed is not None:
            return
        self._closed = reason
        self._call.cancel()
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink(Lost(reason))

    async def _write(self) -> None:
        while True:
            command = await self._commands.get()
            async with asyncio.timeout(self._patience):
                await self._call.write(command)

    async def _read(self) -> None:
        # Not iterated: grpc.aio does not let the two styles mix, and `open` reads.
        while isinstance(response := await self._call.read(), decode_pb2.SessionResponse):
            match response.WhichOneof("event"):
                case "step":
                    self._step(response.step)
                case "reserved":
                    self._tell(response.reserved.ticket, Reserved(response.reserved.tokens_held))
                case "ready":
                    self._tell(response.ready.ticket, Ready(response.ready.kv_bytes))
                case "attempt_failed":
                    failed = response.attempt_failed
                    self._tell(failed.ticket, AttemptFailed(failed.attempt, failed.reason))
                case "rearmed":
                    self._tell(response.rearmed.ticket, Rearmed(response.rearmed.attempt, response.rearmed.tokens_held))
                case "already_ready":
                    already = response.already_ready
                    self._tell(already.ticket, AlreadyReady(already.attempt, already.first_token))
                case "draining":
                    self._draining = True
                    for ticket in list(self._sinks):
                        self._tell(ticket, Draining(response.draining.remaining_ms / 1e3))
                    self._settle()
                case "detached":
                    detached = response.detached
                    self._tell(detached.ticket, Detached(detached.new_ticket, detached.tokens))
                case "hand_off_failed":
                    stays = response.hand_off_failed
                    self._tell(stays.ticket, HandOffFailed(stays.new_ticket, stays.reason))
        raise Unavailable("the decode worker ended the session")

    def _step(self, step: decode_pb2.Step) -> None:
        for item in step.tokens:
            self._tell(item.ticket, NewToken(item.position, item.token, step.seconds))
        for end in step.ends:
            sink = self._sinks.pop(end.ticket, None)
            reason = end_reason_from_proto(end.reason)
            if sink is not None and reason is not None:
                sink(Ended(reason, end.detail))
        if step.ends:
            self._settle()

    def _settle(self) -> None:
        """Let a worker that drains know when nobody waits for its word any more."""
        if self._draining and not self._sinks:
            self._commands.put_nowait(decode_pb2.SessionRequest(settled=decode_pb2.Settled()))

    def _tell(self, ticket: str, event: SessionEvent) -> None:
        # Tickets that were cancelled may still be spoken of for a while.
        sink = self._sinks.get(ticket)
        if sink is not None:
            sink(event)
