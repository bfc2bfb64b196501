"""``host:port``, as people write it."""

from __future__ import annotations

from pdserve.core.errors import ConfigError

ANY_ADDRESS = frozenset({"", "0.0.0.0", "::", "[::]"})
"""Addresses that stand for every interface: to listen on, never to connect to."""


def parse_endpoint(text: str) -> tuple[str, int]:
    """Host and port of ``host:port``, IPv6 hosts in brackets. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{text!r} must be host:port")
    return host, int(port)
