"""``host:port``, as people write it."""

from __future__ import annotations

import re

from pdserve.core.errors import ConfigError, InvalidRequest

ANY_ADDRESS = frozenset({"", "0.0.0.0", "::", "[::]"})
"""Addresses that stand for every interface: to listen on, never to connect to."""

_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,255}")  # a name or an address, with IPv6's zone
_PORT = re.compile(r"[0-9]{1,5}")


def parse_endpoint(text: str) -> tuple[str, int]:
    """Host and port of ``host:port``, IPv6 hosts in brackets. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not _HOST.fullmatch(host) or not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        raise ConfigError(f"{text!r} must be host:port")
    return host, int(port)


def check_endpoint(text: str, field: str) -> None:
    """Raise InvalidRequest for what a peer says is one and is none: grpc fails in many ways on it, or never."""
    try:
        parse_endpoint(text)
    except ConfigError as error:
        raise InvalidRequest(field, str(error)) from None
