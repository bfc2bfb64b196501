"""The data half of a link in one direction: the seam behind which Gloo and NCCL are the same.

Both are written for NCCL's rule: operations match in the order in which they were posted, there is one outstanding at
a time, and tensors are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
from torch._C._distributed_c10d import Store

from pdserve.core.errors import ConfigError, Unavailable

_WARM_UP_BYTES = 64


class LinkLost(Unavailable):
    """The data half of a link failed or ran into its deadline; the link is over."""


class Work(Protocol):
    """One operation under way."""

    def wait(self) -> None:
        """Wait until the host knows that it is complete. Raises LinkLost on failure or at the frame's deadline."""


class Transport(Protocol):
    """One direction of a link. Used by one thread, but for `abort`."""

    @property
    def device(self) -> torch.device:
        """Where the tensors that it moves have to be."""

    def send(self, tensor: torch.Tensor) -> Work:
        """Post a send; `tensor` must not change until the work is done. Raises LinkLost."""

    def recv(self, tensor: torch.Tensor) -> Work:
        """Post a receive of exactly `tensor`'s bytes into it. Raises LinkLost."""

    def abort(self) -> None:
        """From any thread, without waiting: make what is under way end as soon as it can."""

    def close(self) -> None:
        """Release the group. Called once, by the thread that uses it; nothing is under way then."""


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
        from pdserve.transfer.gloo import GlooTransport

        return lambda store, rank, timeout: GlooTransport(store, rank, timeout, hostname, interface)
    if kind == "nccl":
        from pdserve.transfer.nccl import NcclTransport, require_nccl

        require_nccl(device)
        return lambda store, rank, timeout: NcclTransport(store, rank, timeout, torch.device(device))
    raise ConfigError(f"kv_transport is gloo or nccl, not {kind!r}")
