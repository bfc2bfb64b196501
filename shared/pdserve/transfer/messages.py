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
    tokens_end: int = 0  # where the pages end; 0: not told


class Announce(msgspec.Struct, frozen=True, tag=True):
    ticket: str
    attempt: int
    number: int
    layer_start: int
    layer_count: int
    token_start: int
    token_count: int
    bytes: int
    checksum: int | None = None  # CRC-32


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
    """Decode side: the attempt is over without its KV; nothing writes to its pages any more.

    `landed`: how many leading tokens are in their pages, in all layers.
    """

    ticket: str
    attempt: int
    reason: str
    landed: int = 0


class Revoked(msgspec.Struct, frozen=True):
    """Decode side: the ack to `revoke`: nothing writes to the ticket's pages any more.

    `landed`, as in ReceiveFailed, of the attempt that was revoked; 0 where there was none.
    """

    ticket: str
    landed: int = 0


class SendCommitted(msgspec.Struct, frozen=True):
    """Prefill side: the decode worker has everything; nothing reads the pages for this ticket any more."""

    ticket: str
    kv_bytes: int
    seconds: float = 0.0  # from the first announcement until the peer had everything
    exposed: float = 0.0  # of those, after everything was computed
    at: float = 0.0  # when it had, on the monotonic clock: an engine in the midst of a step hears of it later


class SendFailed(msgspec.Struct, frozen=True):
    """Prefill side: the attempt is over (link lost, ticket closed by its owner); nothing reads the pages any more."""

    ticket: str
    reason: str


class SendStopped(msgspec.Struct, frozen=True):
    """Prefill side: the ack to `stop_send`: nothing reads the ticket's pages any more."""

    ticket: str


class Granted(msgspec.Struct, frozen=True):
    """Prefill side: the decode worker reserved pages, and holds that many leading tokens already."""

    ticket: str
    attempt: int
    tokens_held: int


class SendLanded(msgspec.Struct, frozen=True):
    """Sending side: all tokens of the attempt have landed. The pages are not free: the attempt is not over."""

    ticket: str
    kv_bytes: int


class PullWanted(msgspec.Struct, frozen=True):
    """Decode side: the prefill worker granted a pull, tokens [start, end) of what this worker holds of a ticket."""

    ticket: str  # the pull's own name, see `pull_of`
    attempt: int
    peer: str
    start: int
    end: int


TransferEvent = (
    KvReady | ReceiveFailed | Revoked | SendCommitted | SendFailed | SendStopped | SendLanded | Granted | PullWanted
)

PULL_SUFFIX = "/pull"


def pull_of(ticket: str, attempt: int) -> str:
    """The name under which the pull of an attempt travels; routers' own tickets must not end like it."""
    return f"{ticket}/{attempt}{PULL_SUFFIX}"


def pulled_ticket(name: str) -> str:
    """The ticket of a pull."""
    return name.removesuffix(PULL_SUFFIX).rpartition("/")[0]


# What the hub tells the front, for views and metrics.


class LinkReport(msgspec.Struct, frozen=True):
    """One link, from its beginning. Sizes in bytes, rates in bytes a second, times in seconds; 0: not measured."""

    peer: str
    epoch: int
    transport: str
    bytes_sent: int
    bytes_received: int
    bytes_in_flight: int
    frames_in_flight: int
    credit: int
    bytes_per_second: float
    round_trip: float
    path: str = ""  # filled in by the front, which knows both ends
    degraded: str = ""


class TransferReport(msgspec.Struct, frozen=True):
    """All links of a process, those that are gone included in the counters."""

    links: list[LinkReport] = []
    bytes_sent: int = 0
    bytes_received: int = 0
    frames_sent: int = 0
    frames_received: int = 0
    transfers: int = 0  # committed ones, as the sender counts
    transfer_seconds: float = 0.0
    exposed_seconds: float = 0.0
    bytes_produced: int = 0  # KV that was there to be sent, as it weighs on the wire
    send_aborts: int = 0  # attempts that ended uncommitted
    receive_aborts: int = 0
    stale_frames: int = 0  # received for nobody, and dropped
    error_bound: float = 0.0  # the largest error of a number that travelled quantised
    links_lost: int = 0  # that failed, rather than were closed
    threads_abandoned: int = 0
    # What the hand-off counts, beside the links.
    rearms: int = 0
    pulled_tokens: int = 0
    pulls_given_up: int = 0
    handed_off: int = 0  # running sequences that another decode worker took over, and the KV bytes that this took
    handed_off_bytes: int = 0
