"""What happens to one try of a request, as the session and the prefill call tell it."""

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
class NewToken:
    """One token, by its position in the whole sequence."""

    position: int
    token: inference_pb2.Token


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The token that prefill made, and what that took."""

    position: int
    token: inference_pb2.Token
    end: EndReason | None
    cached_tokens: int
    blocks_reused: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The decode worker is done with the ticket."""

    reason: EndReason
    detail: str


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """The prefill call ended before the decode worker had everything."""

    error: PdserveError


@dataclass(frozen=True, slots=True)
class Lost:
    """The session is gone, and the ticket with it."""

    reason: str


Event = Reserved | Ready | NewToken | FirstToken | Ended | PrefillFailed | Lost
# Takes an event at once, without waiting: a session's reader serves everybody.
Sink = Callable[[Event], None]
