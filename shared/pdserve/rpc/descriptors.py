"""How many connections a process may hold: each takes a file descriptor, and a service needs some for itself.

A service that has none left cannot reach its own workers any more, so clients are refused before it comes to that.
"""

from __future__ import annotations

import resource

import structlog

log = structlog.get_logger(__name__)

RLIMIT = resource.RLIMIT_NOFILE
RESERVE = 256  # descriptors that are not for clients: workers, logs, pipes, models
MOST = 1 << 20  # of descriptors; where the hard limit is "unlimited", tables of them grow with the soft one


def room_for(connections: int) -> int:
    """Raise this process's soft limit of descriptors as far as `connections` need and the hard one lets it. Returns how
    many of them there is room for; a warning says so where that is less."""
    soft, hard = (MOST if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(RLIMIT))
    wanted = min(hard, MOST, connections + RESERVE)
    if soft < wanted:
        resource.setrlimit(RLIMIT, (wanted, resource.getrlimit(RLIMIT)[1]))
        soft = wanted
    room = max(1, min(connections, soft - RESERVE))
    if room < connections:
        log.warning("few_descriptors", limit=soft, max_connections=connections, connections=room)
    return room
