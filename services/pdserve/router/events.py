"""What happens to one try of a request, as the sessions with its workers tell it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.core.errors import PdserveError
from pdserve.core.sequence import EndReason
from pdserve.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class Reserved:
    """The decode worker has pages; `tokens_held` leading tokens need no computing there."""

    tokens_held: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The KV is complete on the decode worker."""

    kv_bytes: int


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """The decode worker gave up on an attempt's KV; the reservation stands."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rearmed:
    """The reservation waits for the KV of this attempt now."""

    attempt: int
    tokens_held: int = 0


@dataclass(frozen=True, slots=True)
class AlreadyReady:
    """An older attempt's KV was complete in time; `first_token` followed on its input."""

    attempt: int
    first_token: int


@dataclass(frozen=True, slots=True)
class Placed:
    """There is a worker to go on with: a prefill worker for the next attempt, or a decode worker that takes over. Or
    there was none in time, and `reason` says why."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class NewToken:
    """One token, by its position in the whole sequence; `took` is how many seconds the step that made it computed."""

    position: int
    token: inference_pb2.Token
    took: float = 0.0


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The token that prefill made, and what that took: `took` seconds of computing."""

    attempt: int
    position: int
    token: inference_pb2.Token
    end: EndReason | None
    cached_tokens: int
    blocks_reused: int
    took: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """The decode worker is done with the ticket."""

    reason: EndReason
    detail: str


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """The attempt's prefill ended before the decode worker had everything. `lost`: with the connection, and not by the
    worker's word."""

    attempt: int
    error: PdserveError
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Draining:
    """The decode worker is going to stop in so many `seconds`; until then it hands sequences off."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Detached:
    """A sequence that is handed off, as the ticket `new_ticket`, made its last token where it was: it has `tokens`."""

    new_ticket: str
    tokens: int


@dataclass(frozen=True, slots=True)
class HandOffFailed:
    """It stays where it is, and goes on."""

    new_ticket: str
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The session is gone, and the ticket with it."""

    reason: str


SessionEvent = (
    Reserved | Ready | AttemptFailed | Rearmed | AlreadyReady | NewToken | Draining | Detached | HandOffFailed
)
Event = SessionEvent | FirstToken | PrefillFailed | Placed | Ended | Lost
# Takes an event at once, without waiting: a session's reader serves everybody.
Sink = Callable[[Event], None]
