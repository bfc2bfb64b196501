"""This router's session with one decode worker."""

from __future__ import annotations

import grpc.aio

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
from pdserve.router.worker_session import WorkerSession
from pdserve.rpc.convert import end_reason_from_proto
from pdserve.v1 import decode_pb2, decode_pb2_grpc, sequence_pb2


class DecodeSession(WorkerSession[decode_pb2.SessionRequest, decode_pb2.SessionResponse]):
    """One session: each ticket's events go to its sink."""

    def __init__(self, channel: grpc.aio.Channel, router_id: str, patience: float) -> None:
        """`patience`, in seconds, bounds the handshake and each write."""
        call = decode_pb2_grpc.DecodeServiceStub(channel).Session()
        super().__init__(call, decode_pb2.SessionRequest, decode_pb2.SessionResponse, router_id, patience)
        self._sinks: dict[str, Sink] = {}
        self._draining = False

    def submit(
        self, ticket: str, attempt: int, sequence: sequence_pb2.SequenceSpec, prefill_worker_id: str, sink: Sink
    ) -> None:
        """Ask for a reservation. Its events go to `sink` until Ended, Lost or `cancel`."""
        if self._closed is not None:
            sink(Lost(self._closed))
            return
        self._sinks[ticket] = sink
        submit = decode_pb2.Submit(
            ticket=ticket, attempt=attempt, sequence=sequence, prefill_worker_id=prefill_worker_id
        )
        self._send(submit=submit)

    def rearm(self, ticket: str, attempt: int, sequence: sequence_pb2.SequenceSpec, prefill_worker_id: str) -> None:
        """Ask for a new attempt into the reservation: Rearmed, AlreadyReady or the ticket's end will follow. Nothing
        does where the ticket has ended: its sink knows."""
        if ticket not in self._sinks:
            return
        rearm = decode_pb2.Rearm(ticket=ticket, attempt=attempt, prefill_worker_id=prefill_worker_id, sequence=sequence)
        self._send(rearm=rearm)

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
        self._send(hand_off=hand_off)

    def call_off(self, ticket: str, new_ticket: str) -> None:
        """Have a sequence that is being moved go on where it is. No event follows."""
        if ticket in self._sinks:
            called_off = decode_pb2.CallOff(ticket=ticket, new_ticket=new_ticket)
            self._send(call_off=called_off)

    def cancel(self, ticket: str) -> None:
        """End a ticket, if it has not ended. No event follows."""
        if self._sinks.pop(ticket, None) is not None and self._closed is None:
            self._send(cancel=decode_pb2.Cancel(ticket=ticket))
            self._settle()

    def _lose(self, reason: str) -> None:
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink(Lost(reason))

    def _take(self, event: decode_pb2.SessionResponse) -> None:
        match event.WhichOneof("event"):
            case "step":
                self._step(event.step)
            case "reserved":
                self._tell(event.reserved.ticket, Reserved(event.reserved.tokens_held))
            case "ready":
                self._tell(event.ready.ticket, Ready(event.ready.kv_bytes))
            case "attempt_failed":
                failed = event.attempt_failed
                self._tell(failed.ticket, AttemptFailed(failed.attempt, failed.reason))
            case "rearmed":
                self._tell(event.rearmed.ticket, Rearmed(event.rearmed.attempt, event.rearmed.tokens_held))
            case "already_ready":
                already = event.already_ready
                self._tell(already.ticket, AlreadyReady(already.attempt, already.first_token))
            case "draining":
                self._draining = True
                for ticket in list(self._sinks):
                    self._tell(ticket, Draining(event.draining.remaining_ms / 1e3))
                self._settle()
            case "detached":
                detached = event.detached
                self._tell(detached.ticket, Detached(detached.new_ticket, detached.tokens))
            case "hand_off_failed":
                stays = event.hand_off_failed
                self._tell(stays.ticket, HandOffFailed(stays.new_ticket, stays.reason))

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
            self._send(settled=decode_pb2.Settled())

    def _tell(self, ticket: str, event: SessionEvent) -> None:
        # Tickets that were cancelled may still be spoken of for a while.
        sink = self._sinks.get(ticket)
        if sink is not None:
            sink(event)
