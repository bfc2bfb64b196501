"""One try of a request: a ticket on a pair of workers, from submitting it to letting go of it.

The ticket's prefill half may be replaced while its reservation stands, each time under the next attempt number: find
a worker, rearm, and once the decode worker has agreed, prefill.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self

import structlog

from pdserve.core.errors import PdserveError, Unavailable
from pdserve.core.sequence import SequenceSpec
from pdserve.router.assignment import Assignment
from pdserve.router.events import (
    AlreadyReady,
    AttemptFailed,
    Ended,
    Event,
    Lost,
    NewToken,
    Placed,
    PrefillFailed,
    Ready,
    Rearmed,
    Reserved,
)
from pdserve.rpc.convert import spec_to_proto
from pdserve.v1 import inference_pb2, prefill_pb2

log = structlog.get_logger(__name__)

Stamped = tuple[int, "Ticket", Event]
# Seconds that a prefill has to end by itself once the decode worker has given its attempt up: it may have the
# answer's only token, or knows why. One that hangs is taken for failed then.
FAREWELL = 0.25
# Seconds for the decode worker's answer to a Rearm; its engine reads between two steps.
ANSWER = 5.0
# So many events for a reader that lags wait as they came. A token is a part of its step's message, and keeps all of
# that in memory: with 100 answers in a step 19 KB, where the bytes of the token alone are fewer than 60.
LAGS = 64


@dataclass(frozen=True, slots=True)
class _Packed:
    """A NewToken by itself."""

    position: int
    token: bytes
    took: float

    def unpack(self) -> NewToken:
        return NewToken(self.position, inference_pb2.Token.FromString(self.token), self.took)


class Ticket:
    """A scope: entering submits to the decode worker and starts the prefill, at the same time; leaving cancels
    whatever still runs and takes the request off all ledgers.

    Events are stamped (monotonic nanoseconds) as they come, since whoever reads them may be held up by a slow client.
    Their number is bounded by what the sequence may still produce; a worker that sends more loses the ticket.

    A ticket that takes over `leaving`, which runs on another decode worker, gets its KV from there, and both tell their
    events in one queue.
    """

    def __init__(self, assignment: Assignment, spec: SequenceSpec, name: str, leaving: Ticket | None = None) -> None:
        """`name` is the ticket's id, which nobody may guess."""
        self.id = name
        self.assignment = assignment
        self.started = time.monotonic_ns()
        self.attempt = 1
        self._sequence = spec_to_proto(spec)  # for both workers
        # By attempt: how many tokens were given, and to which prefill worker.
        self._given = {1: len(spec.token_ids)}
        source = leaving.assignment.decode if leaving is not None else assignment.prefill
        self._prefill_ids = {1: source.worker_id if source else ""}
        self._events: asyncio.Queue[tuple[int, Ticket, Event | _Packed]] = (
            asyncio.Queue() if leaving is None else leaving._events
        )
        self._room = spec.params.max_tokens + spec.prompt_len - len(spec.token_ids) + 1
        self._tasks: set[asyncio.Task[None]] = set()
        self._prefilling: int | None = None  # the attempt that a prefill worker was told of
        self._placing: asyncio.Task[None] | None = None
        self._placed: Assignment | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._answers: tuple[type[Event], ...] = ()
        # At assignment time the workers were connected; what they are now may be another connection.
        self._session = assignment.decode.session if assignment.decode else None
        self._prefills = assignment.prefill.prefills if assignment.prefill else None

    @property
    def given(self) -> int:
        """How many tokens the attempt was given: the first one that it makes stands at this position."""
        return self._given[self.attempt]

    @property
    def prefill_worker_id(self) -> str:
        """The worker whose KV the attempt brings; empty where there is none."""
        return self._prefill_ids[self.attempt]

    async def __aenter__(self) -> Self:
        self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    def open(self) -> None:
        """What entering does. The prefill first: a token waits for it, and for the reservation only the next one."""
        decode, session = self.assignment.decode, self._session
        if decode is not None and session is None:
            self._put(Lost(f"connection to {decode.worker_id} lost"))
            return
        try:
            if self.assignment.prefill is not None:
                self._start_prefill()
            if session is not None:
                session.submit(self.id, self.attempt, self._sequence, self.prefill_worker_id, self._put)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """What leaving does, without waiting for its tasks. May be called again."""
        if self._session is not None:
            self._session.cancel(self.id)
        self.stop_placing()
        self._end_prefill()
        self.assignment.release()

    async def leave(self) -> None:
        """Close, and see its tasks end."""
        self.close()
        # Their ends are local: calls are cancelled, nobody is waited for.
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.stop_placing()

    async def next_events(self) -> list[Stamped]:
        """All events there are, at least one, in order, each with the ticket that it is about."""
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return [
            (stamp, ticket, event.unpack() if isinstance(event, _Packed) else event) for stamp, ticket, event in events
        ]

    def given_up(self, reason: str) -> None:
        """The decode worker expects no more KV of this attempt: its prefill fails in a moment, or counts as
        failed."""
        self._after(FAREWELL, PrefillFailed(self.attempt, Unavailable(reason)))

    def place(self, place: Callable[[], Awaitable[Assignment]]) -> None:
        """Find a worker to go on with; Placed tells what came of it."""
        self._placing = asyncio.create_task(self._place(place), name=f"place {self.id[:8]}")
        self._tasks.add(self._placing)

    def stop_placing(self) -> None:
        """Look for no other worker, and let go of one that was found. May be called again."""
        if self._placing is not None:
            self._placing.cancel()
            self._placing = None
        if self._placed is not None:
            self._placed.release()
            self._placed = None

    def take_placed(self) -> Assignment | None:
        """The worker that was found, if there is one; the caller must release it."""
        placed, self._placed = self._placed, None
        return placed

    def hand_off(self, other: Ticket, tokens: int) -> None:
        """Have the decode worker send its first `tokens` tokens' KV to the one of `other`, and then the rest."""
        decode = other.assignment.decode
        if self._session is not None and decode is not None and decode.snapshot is not None:
            endpoint = decode.snapshot.endpoint
            self._session.hand_off(self.id, other.id, other.attempt, decode.worker_id, endpoint, tokens)

    def call_off(self, other: Ticket) -> None:
        """Have the decode worker go on with it."""
        if self._session is not None:
            self._session.call_off(self.id, other.id)

    def expect(self, seconds: float | None, what: str = "") -> None:
        """Take the ticket for lost unless `what` comes in time. None: it came."""
        self._after(seconds, Lost(f"{what} did not come within {seconds} s"), (Ready, AttemptFailed, Ended))

    def rearm(self, spec: SequenceSpec) -> None:
        """Ask the decode worker for the next attempt at `spec`, by the prefill worker that was found.

        Where none was looked for, since the KV is complete, the answer will be AlreadyReady.
        """
        self._end_prefill()
        worker_id, found = self.prefill_worker_id, self.take_placed()
        if found is not None and found.prefill is not None:
            self.assignment.replace_prefill(found)
            worker_id, self._prefills = found.prefill.worker_id, found.prefill.prefills
        self.attempt += 1
        self._sequence = spec_to_proto(spec)
        self._given[self.attempt] = len(spec.token_ids)
        self._prefill_ids[self.attempt] = worker_id
        if self._session is not None:
            self._session.rearm(self.id, self.attempt, self._sequence, worker_id)
        lost = Lost(f"the decode worker did not answer a Rearm within {ANSWER} s")
        self._after(ANSWER, lost, (Rearmed, AlreadyReady, Ended))

    def rearmed(self, tokens_held: int) -> None:
        """The decode worker agreed, and has that many leading tokens: from now on the attempt may be sent."""
        self.assignment.decode_tokens_held = tokens_held
        self._after(None)
        self._start_prefill()

    def back_to(self, attempt: int) -> bool:
        """An older attempt had completed: it is the one that counts, and no prefill worker is needed any more. False
        where there never was such an attempt."""
        if attempt not in self._given:
            return False
        self.attempt = attempt
        self._after(None)
        if self.assignment.prefill_entry is not None:
            self.assignment.prefill_entry.close()
        return True

    def _start_prefill(self) -> None:
        prefill, decode = self.assignment.prefill, self.assignment.decode
        assert prefill is not None
        request = prefill_pb2.PrefillRequest(
            ticket=self.id,
            attempt=self.attempt,
            sequence=self._sequence,
            decode_worker_id=decode.worker_id if decode else "",
            decode_endpoint=decode.snapshot.endpoint if decode and decode.snapshot else "",
            decode_tokens_held=self.assignment.decode_tokens_held,
        )
        try:
            if self._prefills is None:
                raise Unavailable(f"connection to {prefill.worker_id} lost")
            self._prefills.prefill(request, self.assignment.prefill_entry, self._put)
            self._prefilling = self.attempt
        except Unavailable as error:  # it is gone since it was found, and knows nothing of this
            self._put(PrefillFailed(self.attempt, error))

    def _put(self, event: Event) -> None:
        """Take an event, from the session's reader: never waits."""
        if isinstance(event, self._answers):
            self._after(None)  # here, since whoever reads may be late
        decode_entry = self.assignment.decode_entry
        if isinstance(event, NewToken):
            self._room -= 1
            if self._room < 0:
                event = Lost("the decode worker sent more tokens than the sequence may have")
            elif self.assignment.prefill is None and decode_entry is not None:
                decode_entry.prefilled()
        elif isinstance(event, Reserved) and decode_entry is not None:
            decode_entry.settled()
        elif isinstance(event, Ended | Lost) and decode_entry is not None:
            decode_entry.close()
        self._events.put_nowait((time.monotonic_ns(), self, self._kept(event)))

    def _kept(self, event: Event) -> Event | _Packed:
        if isinstance(event, NewToken) and self._events.qsize() >= LAGS:
            return _Packed(event.position, event.token.SerializeToString(), event.took)
        return event

    async def _place(self, place: Callable[[], Awaitable[Assignment]]) -> None:
        try:
            self._placed = await place()
            self._put(Placed())
        except PdserveError as error:
            self._put(Placed(str(error)))
        except Exception as error:  # a bug must not leave the request waiting for its deadline
            log.error("placing_failed", error=repr(error), exc_info=error)
            self._put(Placed(repr(error)))

    def _after(self, seconds: float | None, event: Event | None = None, answers: tuple[type[Event], ...] = ()) -> None:
        """Put `event` in some seconds, unless one of `answers` comes, or this is called again, before: one thing at a
        time is waited for."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._answers = answers
        if seconds is not None and event is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._put, event)

    def _end_prefill(self) -> None:
        self._after(None)
        if self._prefills is not None and self._prefilling is not None:
            self._prefills.cancel(self.id, self._prefilling)
        self._prefilling = None
