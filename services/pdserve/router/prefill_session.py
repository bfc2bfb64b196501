"""This router's session with one prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

import grpc.aio
from google.protobuf.message import DecodeError

from pdserve.core.errors import PdserveError, Unavailable
from pdserve.router.events import FirstToken, PrefillFailed, Sink
from pdserve.router.ledger import Entry
from pdserve.router.worker_session import WorkerSession
from pdserve.rpc.convert import end_reason_from_proto
from pdserve.rpc.errors import error_from_status
from pdserve.v1 import prefill_pb2, prefill_pb2_grpc


@dataclass(slots=True)
class _Attempt:
    entry: Entry | None
    sink: Sink
    alone: bool  # nobody takes the KV over: the first token is the last that is heard


class PrefillSession(WorkerSession[prefill_pb2.PrefillSessionRequest, prefill_pb2.PrefillSessionResponse]):
    """One session: each attempt's first token and failure go to its sink; success is told by nothing more."""

    def __init__(self, channel: grpc.aio.Channel, router_id: str, patience: float) -> None:
        """`patience`, in seconds, bounds the handshake and each write."""
        call = prefill_pb2_grpc.PrefillServiceStub(channel).PrefillSession()
        kinds = prefill_pb2.PrefillSessionRequest, prefill_pb2.PrefillSessionResponse
        super().__init__(call, *kinds, router_id, patience)
        self._attempts: dict[tuple[str, int], _Attempt] = {}

    @property
    def running(self) -> int:
        """How many attempts have not ended."""
        return len(self._attempts)

    def prefill(self, request: prefill_pb2.PrefillRequest, entry: Entry | None, sink: Sink) -> None:
        """Begin an attempt. Closes `entry`, its account in the ledger, in the end. Raises Unavailable where the session
        is over."""
        if self._closed is not None:
            raise Unavailable(self._closed)
        self._attempts[request.ticket, request.attempt] = _Attempt(entry, sink, not request.decode_worker_id)
        self._send(prefill=request)

    def cancel(self, ticket: str, attempt: int) -> None:
        """End an attempt, and the work for it, if it has not ended. No event follows."""
        if self._end(ticket, attempt) is not None and self._closed is None:
            self._send(cancel=prefill_pb2.PrefillCancel(ticket=ticket, attempt=attempt))

    def _lose(self, reason: str) -> None:
        for ticket, attempt in list(self._attempts):
            self._fail(ticket, attempt, Unavailable(reason), lost=True)

    def _take(self, event: prefill_pb2.PrefillSessionResponse) -> None:
        # Attempts that were cancelled may still be spoken of for a while.
        match event.WhichOneof("event"):
            case "accepted":
                taken = self._attempts.get((event.accepted.ticket, event.accepted.attempt))
                if taken is not None and taken.entry is not None:
                    taken.entry.settled()
            case "first_token":
                self._first_token(event.first_token)
            case "committed":
                self._end(event.committed.ticket, event.committed.attempt)
            case "failed":
                failed = event.failed
                self._fail(failed.ticket, failed.attempt, _error(failed.status))

    def _first_token(self, first: prefill_pb2.FirstToken) -> None:
        ticket = first.token.ticket
        attempt = self._attempts.get((ticket, first.attempt))
        if attempt is None:
            return
        if attempt.entry is not None:
            attempt.entry.prefilled()
        attempt.sink(
            FirstToken(
                attempt=first.attempt,
                position=first.token.position,
                token=first.token.token,
                end=end_reason_from_proto(first.end),
                cached_tokens=first.cached_tokens,
                blocks_reused=first.blocks_reused,
                took=first.compute_ms / 1e3,
            )
        )
        if attempt.alone or first.end:
            self._end(ticket, first.attempt)

    def _fail(self, ticket: str, number: int, error: PdserveError, *, lost: bool = False) -> None:
        attempt = self._end(ticket, number)
        if attempt is not None:
            attempt.sink(PrefillFailed(number, error, lost))

    def _end(self, ticket: str, number: int) -> _Attempt | None:
        """Forget an attempt. None: it has ended before."""
        attempt = self._attempts.pop((ticket, number), None)
        if attempt is not None and attempt.entry is not None:
            attempt.entry.close()
        return attempt


def _error(status: bytes) -> PdserveError:
    try:
        return error_from_status(status)
    except DecodeError:
        return Unavailable("the prefill worker failed, and does not say why")
