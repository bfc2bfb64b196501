"""The data half of a link in one direction: the seam behind which Gloo, NCCL and CUDA IPC are the same.

All are written for NCCL's rule: operations match in the order in which they were posted, there is one outstanding at
a time, and tensors are contiguous.
"""

from __future__ import annotations

from typing import Protocol

import torch

from pdserve.core.errors import Unavailable


class LinkLost(Unavailable):
    """The data half of a link failed or ran into its deadline; the link is over."""


class PeerGone(LinkLost):
    """The peer closed its end, or its process is gone: nothing of it is under way any more."""


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
        """Release the group. Called once, by the thread that uses it, after a failure too.

        When it returns, nothing writes any more into a tensor that was given to `recv`. May take a deadline.
        """
