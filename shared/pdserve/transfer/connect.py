"""Making one direction of a link: which transport, and its first operation."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from pdserve.core.errors import ConfigError
from pdserve.transfer.gloo import GlooTransport
from pdserve.transfer.nccl import NcclTransport, require_nccl
from pdserve.transfer.transport import Transport

_WARM_UP_BYTES = 64

Connect = Callable[[Store, int, timedelta], Transport]


def warm_up(transport: Transport, sends: bool) -> None:
    """Send one small tensor through: connections and communicators are made by the first operation."""
    tensor = torch.zeros(_WARM_UP_BYTES, dtype=torch.uint8, device=transport.device)
    (transport.send if sends else transport.recv)(tensor).wait()


def connector(kind: str, device: str, hostname: str, interface: str) -> Connect:
    """How to make one direction of a link: (store, own rank of 0 and 1, timeout) -> Transport.

    `hostname` or `interface` names where Gloo listens. Raises ConfigError for a transport that cannot run here.
    """
    if kind == "gloo":
        return lambda store, rank, timeout: GlooTransport(store, rank, timeout, hostname, interface)
    if kind == "nccl":
        require_nccl(device)
        return lambda store, rank, timeout: NcclTransport(store, rank, timeout, torch.device(device))
    raise ConfigError(f"kv_transport is gloo or nccl, not {kind!r}")
