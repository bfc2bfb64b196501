"""Channels between services, and the options that both ends of a connection have."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import grpc
import grpc.aio

from pdserve.rpc.access import INTERNAL, PLAIN, Access
from pdserve.rpc.metadata_channel import MetadataChannel
from pdserve.rpc.tls import Tls

MAX_MESSAGE_BYTES = 256 << 20
_numbers = itertools.count()
Option = tuple[str, int | str]

MESSAGE_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]

# What a router takes from its clients: twice what it accepts (see router.validate), whose refusal names the field.
PUBLIC_MESSAGE_BYTES = 32 << 20

# Without data a client pings every 30 s, which a server must not take for abuse: see SERVER_OPTIONS.
CLIENT_OPTIONS: list[tuple[str, int]] = [
    *MESSAGE_OPTIONS,
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A worker that comes back should be seen at once; the default backs off up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
]

# The server pings too, within a lease, so that a peer that vanished without a reset is noticed and its work ends.
SERVER_OPTIONS: list[tuple[str, int]] = [
    *MESSAGE_OPTIONS,
    ("grpc.keepalive_time_ms", 2_500),
    ("grpc.keepalive_timeout_ms", 2_500),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Calls at a time on one connection; more wait at the client. One whose client does not read stays open until it
    # does, or leaves, and holds a few KB.
    ("grpc.max_concurrent_streams", 4096),
    # Who connects and then says nothing is no client.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Two services on one port is a mistake, not load balancing.
    ("grpc.so_reuseport", 0),
]


def server_options(max_message_bytes: int, max_connections: int, idle_seconds: float) -> list[tuple[str, int]]:
    """SERVER_OPTIONS of a server that takes messages of at most that many bytes, closes what comes beyond so many
    connections, and asks connections without a call for so long to go."""
    limits = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_connection_idle_ms", round(idle_seconds * 1e3)),
    ]
    named = {name for name, _ in limits}
    return [*limits, *(option for option in SERVER_OPTIONS if option[0] not in named)]


def connect(target: str, access: Access = PLAIN, options: Sequence[Option] | None = None) -> grpc.aio.Channel:
    """A channel to `target`, whose calls carry `access`, with a connection of its own (grpc would share one between
    equal channels).

    Connects with its first call. Use it with `async with`, or close it. `options` take the place of CLIENT_OPTIONS.
    Raises ConfigError for files of TLS that cannot be read.
    """
    own = _own_options(options)
    if access.tls is None:
        channel = grpc.aio.insecure_channel(target, options=own)
    else:
        channel = grpc.aio.secure_channel(target, access.tls.credentials(), options=own)
    return channel if access.secret is None else MetadataChannel(channel, ((INTERNAL, access.secret.text),))


def connect_blocking(target: str, tls: Tls | None = None) -> grpc.Channel:
    """As `connect`, for threads instead of an event loop, and for clients, who have no secret."""
    if tls is None:
        return grpc.insecure_channel(target, options=_own_options())
    return grpc.secure_channel(target, tls.credentials(), options=_own_options())


def _own_options(options: Sequence[Option] | None = None) -> list[Option]:
    return [
        *(CLIENT_OPTIONS if options is None else options),
        ("grpc.use_local_subchannel_pool", 1),
        ("pdserve.channel_number", next(_numbers)),
    ]
