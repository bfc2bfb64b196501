"""One try of a request: a ticket on a pair of workers, from submitting it to letting go of it."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Self

import grpc.aio

from pdserve.core.errors import Unavailable
from pdserve.core.sequence import SequenceSpec
from pdserve.router.dispatch import Assignment
from pdserve.router.events import Ended, Event, FirstToken, Lost, NewToken, PrefillFailed, Reserved
from pdserve.rpc.convert import end_reason_from_proto, spec_to_proto
from pdserve.rpc.errors import error_from_call
from pdserve.v1 import prefill_pb2, prefill_pb2_grpc

Stamped = tuple[int, Event]


class Attempt:
    """A scope: entering submits to the decode worker and starts the prefill, at the same time; leaving cancels
    whatever still runs and takes the request off both ledgers.

    Events are stamped (monotonic nanoseconds) as they come, since whoever reads them may be held up by a slow client.
    Their number is bounded by what the sequence may still produce; a worker that sends more loses the ticket.
    """

    def __init__(self, assignment: Assignment, spec: SequenceSpec, number: int) -> None:
        self.ticket = secrets.token_hex(16)
        self.assignment = assignment
        self.started = time.monotonic_ns()
        self._spec = spec
        self._number = number
        self._events: asyncio.Queue[Stamped] = asyncio.Queue()
        self._room = spec.params.max_tokens + spec.prompt_len - len(spec.token_ids) + 1
        self._prefill: asyncio.Task[None] | None = None
        # At assignment time the workers were connected; what they are now may be another connection.
        self._session = assignment.decode.session if assignment.decode else None
        self._channel = assignment.prefill.channel if assignment.prefill else None

    async def __aenter__(self) -> Self:
        prefill, decode = self.assignment.prefill, self.assignment.decode
        if decode is not None:
            if self._session is None:
                self._put(Lost(f"connection to {decode.worker_id} lost"))
            else:
                peer = prefill.worker_id if prefill else ""
                self._session.submit(self.ticket, self._number, self._spec, peer, self._put)
        if prefill is not None:
            if self._channel is None:
                self._put(PrefillFailed(Unavailable(f"connection to {prefill.worker_id} lost")))
            else:
                self._prefill = asyncio.create_task(self._run_prefill(self._channel), name=f"prefill {self.ticket[:8]}")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            self._session.cancel(self.ticket)
        self.assignment.release()
        if self._prefill is not None:
            self._prefill.cancel()
            # Its end is local: the call is cancelled, nobody is waited for.
            await asyncio.gather(self._prefill, return_exceptions=True)

    async def next_events(self) -> list[Stamped]:
        """All events there are, at least one, in order."""
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return events

    def _put(self, event: Event) -> None:
        """Take an event, from the session's reader: never waits."""
        prefill_entry, decode_entry = self.assignment.prefill_entry, self.assignment.decode_entry
        if isinstance(event, NewToken):
            self._room -= 1
            if self._room < 0:
                event = Lost("the decode worker sent more tokens than the sequence may have")
            elif prefill_entry is None and decode_entry is not None:
                decode_entry.prefilled()
        elif isinstance(event, Reserved) and decode_entry is not None:
            decode_entry.settled()
        elif isinstance(event, FirstToken) and prefill_entry is not None:
            prefill_entry.prefilled()
            prefill_entry.settled()
        elif isinstance(event, Ended | Lost) and decode_entry is not None:
            decode_entry.close()
        self._events.put_nowait((time.monotonic_ns(), event))

    async def _run_prefill(self, channel: grpc.aio.Channel) -> None:
        assignment = self.assignment
        decode = assignment.decode
        endpoint = decode.snapshot.endpoint if decode and decode.snapshot else ""
        request = prefill_pb2.PrefillRequest(
            ticket=self.ticket,
            attempt=self._number,
            sequence=spec_to_proto(self._spec),
            decode_worker_id=decode.worker_id if decode else "",
            decode_endpoint=endpoint,
        )
        call = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(request, timeout=self._spec.time_remaining)
        complete = False
        try:
            async for response in call:
                if response.HasField("first_token"):
                    self._put(_first_token(response.first_token))
                    complete = complete or decode is None or response.first_token.end != 0
                else:
                    complete = True
            if not complete:
                self._put(PrefillFailed(Unavailable("the prefill worker stopped before its KV was taken over")))
        except grpc.aio.AioRpcError as error:
            if not complete:
                self._put(PrefillFailed(error_from_call(error)))
        finally:
            call.cancel()
            if assignment.prefill_entry is not None:
                assignment.prefill_entry.close()


def _first_token(message: prefill_pb2.FirstToken) -> FirstToken:
    return FirstToken(
        position=message.token.position,
        token=message.token.token,
        end=end_reason_from_proto(message.end),
        cached_tokens=message.cached_tokens,
        blocks_reused=message.blocks_reused,
    )
