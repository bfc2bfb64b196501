"""What travels on a link's control half, and what the hub of links tells the engine loop.

The first group mirrors kv.proto one to one; `rpc` converts between the two. The second never leaves the process.
"""

from __future__ import annotations

import msgspec


class StoreSet(msgspec.Struct, frozen=True, tag=True):
    key: str
    value: bytes


class Grant(msgspec.Struct, frozen=True, tag=True):
    ticket: str
    attempt: int
    tokens_held: int


class Announce(msgspec.Struct, frozen=True, tag=True):
    ticket: str
    attempt: int
    number: int
    layer_start: int
    layer_count: int
    token_start: int
    token_count: int
    bytes: int


class Credit(msgspec.Struct, frozen=True, tag=True):
    bytes: int


class Commit(msgspec.Struct, frozen=True, tag=True):
    ticket: str
    attempt: int
    frame_count: int
    first_token: int


class Committed(msgspec.Struct, frozen=True, tag=True):
    ticket: str
    attempt: int


class TicketClosed(msgspec.Struct, frozen=True, tag=True):
    ticket: str
    attempt: int
    reason: str


ControlMessage = StoreSet | Grant | Announce | Credit | Commit | Committed | TicketClosed


# What the hub tells the engine loop.


class KvReady(msgspec.Struct, frozen=True):
    """Decode side: all KV of the attempt is in its pages, and this is the first token. Pages are quiet now."""

    ticket: str
    attempt: int
    first_token: int
    kv_bytes: int


class ReceiveFailed(msgspec.Struct, frozen=True):
    """Decode side: the attempt is over without its KV; nothing writes to its pages any more."""

    ticket: str
    attempt: int
    reason: str


class Revoked(msgspec.Struct, frozen=True):
    """Decode side: the ack to `revoke`: nothing writes to the ticket's pages any more."""

    ticket: str


class SendCommitted(msgspec.Struct, frozen=True):
    """Prefill side: the decode worker has everything; nothing reads the pages for this ticket any more."""

    ticket: str
    kv_bytes: int


class SendFailed(msgspec.Struct, frozen=True):
    """Prefill side: the attempt is over (link lost, ticket closed by its owner); nothing reads the pages any more."""

    ticket: str
    reason: str


class SendStopped(msgspec.Struct, frozen=True):
    """Prefill side: the ack to `stop_send`: nothing reads the ticket's pages any more."""

    ticket: str


TransferEvent = KvReady | ReceiveFailed | Revoked | SendCommitted | SendFailed | SendStopped
