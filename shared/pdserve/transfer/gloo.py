"""Links over Gloo: TCP between CPU memories. Holds callers to NCCL's rules, which Gloo itself would not mind broken."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from pdserve.transfer.transport import LinkLost, PeerGone, Work

_TAG = 0  # the same for all, so that nothing but the order of posting matches a receive to its send


class GlooTransport:
    """A two-member group. Its timeout is the frame's deadline; after one has passed, the pair is closed for good.

    A send is through when the peer has posted its receive and the bytes are on their way. Sending and receiving are two
    directions: a link uses a group for one of them, `cuda-ipc` signals both ways over one.
    """

    device = torch.device("cpu")

    def __init__(self, store: Store, rank: int, timeout: timedelta, hostname: str, interface: str) -> None:
        """Waits for the peer. Raises LinkLost where it does not come or cannot be reached."""
        where = {"interface": interface} if interface else {"hostname": hostname}
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(**where)]
        options._timeout = timeout
        options._threads = 1
        self._peer = 1 - rank
        self._timeout = timeout
        self._outstanding: dict[str, _GlooWork] = {}
        try:
            self._group: Any = ProcessGroupGloo(store, rank, 2, options)
        except (RuntimeError, TimeoutError) as error:
            raise LinkLost(f"no Gloo group with the peer: {_first_line(error)}") from error

    def send(self, tensor: torch.Tensor) -> Work:
        return self._post("send", tensor)

    def recv(self, tensor: torch.Tensor) -> Work:
        return self._post("recv", tensor)

    def abort(self) -> None:
        """Nothing to do: Gloo's abort wakes nobody; the deadline, or the peer's closing its end, does."""

    def close(self) -> None:
        self._outstanding.clear()
        self._group = None  # the last reference closes the sockets, which wakes the peer

    def _post(self, operation: str, tensor: torch.Tensor) -> Work:
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError(f"{operation} of a tensor that is not contiguous in CPU memory")
        if (before := self._outstanding.get(operation)) is not None and not before.done:
            raise ValueError(f"{operation} while another operation of this direction is outstanding")
        try:
            work = getattr(self._group, operation)([tensor], self._peer, _TAG)
        except RuntimeError as error:
            raise _lost(error) from error
        posted = self._outstanding[operation] = _GlooWork(work, self._timeout)
        return posted


class _GlooWork:
    def __init__(self, work: Any, timeout: timedelta) -> None:
        self._work, self._timeout = work, timeout
        self.done = False

    def wait(self) -> None:
        try:
            self._work.wait(self._timeout)
        except RuntimeError as error:
            raise _lost(error) from error
        finally:
            self._work = None  # it holds the group's sockets open
        self.done = True


def _lost(error: RuntimeError) -> LinkLost:
    reason = _first_line(error)
    return PeerGone(reason) if "by peer" in reason else LinkLost(reason)  # "closed by peer", "reset by peer"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]
