"""Which protocol versions this build speaks on Watch, Session and Link, and how two peers agree on one."""

from __future__ import annotations

from importlib import metadata

import grpc

from pdserve.rpc.errors import RpcError
from pdserve.v1 import worker_pb2

# 1 knew no Rearm, 2 no PrefillSession: nothing that was released speaks them.
PROTOCOL_MIN = 3
PROTOCOL_MAX = 3


def our_versions() -> worker_pb2.VersionRange:
    return worker_pb2.VersionRange(min=PROTOCOL_MIN, max=PROTOCOL_MAX)


def agree(theirs_min: int, theirs_max: int) -> int:
    """The highest version that both speak. Raises RpcError (FAILED_PRECONDITION) with both ranges where none is."""
    best = min(PROTOCOL_MAX, theirs_max)
    if best < max(PROTOCOL_MIN, theirs_min):
        raise RpcError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"no common protocol version: {PROTOCOL_MIN} to {PROTOCOL_MAX} here, {theirs_min} to {theirs_max} there",
        )
    return best


def software_version() -> str:
    """The installed pdserve's version; "source" where it runs from a checkout that is not installed."""
    try:
        return metadata.version("pdserve")
    except metadata.PackageNotFoundError:
        return "source"
