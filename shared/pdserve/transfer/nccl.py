"""Links over NCCL: GPU memory to GPU memory, one communicator a direction, on a stream of its own.

NCCL has no deadlines: a guard thread aborts the communicator when one passes, which ends the kernel that spins, and
with it the wait of the link's thread. Nothing here polls.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from pdserve.core.errors import ConfigError
from pdserve.transfer.transport import LinkLost, Work

MAX_CHANNELS = 4  # each takes an SM while a frame is under way, and memory in the communicator
_OFF = ("0", "NO", "N", "OFF", "FALSE")
_MUST_BE_OFF = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")


def require_nccl(device: str) -> None:
    """Raise ConfigError unless NCCL can serve `device` and a failed link would leave the process standing.

    Left to its defaults ProcessGroupNCCL ends the process on a group's error, and when its heartbeat stalls.
    """
    if torch.device(device).type != "cuda" or not dist.is_nccl_available():
        raise ConfigError(f"kv_transport nccl needs a CUDA device and a torch with NCCL; the device is {device}")
    for name in _MUST_BE_OFF:
        if os.environ.get(name, "").upper() not in _OFF:
            raise ConfigError(f"kv_transport nccl needs {name}=0 in the environment before torch loads")


class NcclTransport:
    """A two-member group. Making it does not wait for the peer; the first operation does: warm it up at once."""

    def __init__(self, store: Store, rank: int, timeout: timedelta, device: torch.device) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.config.min_ctas = 1
        options.config.max_ctas = MAX_CHANNELS
        self.device = device
        self._peer = 1 - rank
        self._outstanding: _NcclWork | None = None
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._group: Any = dist.ProcessGroupNCCL(store, rank, 2, options)
        self._guard = _Guard(self._group, timeout.total_seconds())

    def send(self, tensor: torch.Tensor) -> Work:
        return self._post("send", tensor)

    def recv(self, tensor: torch.Tensor) -> Work:
        return self._post("recv", tensor)

    def abort(self) -> None:
        self._guard.fire("the link was closed")

    def close(self) -> None:
        self._outstanding = None
        self._guard.fire("closed")  # an abort frees the communicator too, and needs nobody at the other end
        self._guard.join()
        self._group = None

    def _post(self, operation: str, tensor: torch.Tensor) -> Work:
        if not tensor.is_contiguous() or tensor.device != self.device:
            raise ValueError(f"{operation} of a tensor that is not contiguous on {self.device}")
        if self._outstanding is not None and not self._outstanding.done:
            raise ValueError(f"{operation} while another operation of this direction is outstanding")
        self._guard.arm()  # the first operation waits for the peer inside the call
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                getattr(self._group, operation)([tensor], self._peer, 0).wait()  # our stream waits, the host does not
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                event.record(self._stream)
        except RuntimeError as error:
            self._guard.disarm()
            raise LinkLost(str(error).partition("\n")[0][:300]) from error
        self._outstanding = _NcclWork(event, self._guard)
        return self._outstanding


class _NcclWork:
    def __init__(self, event: torch.cuda.Event, guard: _Guard) -> None:
        self._event, self._guard = event, guard
        self.done = False

    def wait(self) -> None:
        self._guard.arm()
        try:
            self._event.synchronize()
        except RuntimeError as error:
            raise LinkLost(str(error).partition("\n")[0][:300]) from error
        finally:
            fired = self._guard.disarm()
        if fired:  # an aborted kernel completes its event too
            raise LinkLost(fired)
        self.done = True


class _Guard:
    """Aborts a group, from a thread of its own, when an operation's deadline passes or when told to."""

    def __init__(self, group: Any, patience: float) -> None:
        self._group = group
        self._patience = patience
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._fired = ""
        self._thread = threading.Thread(target=self._watch, name="kv-nccl-guard", daemon=True)
        self._thread.start()

    def arm(self) -> None:
        """Start the deadline anew."""
        with self._changed:
            self._deadline = time.monotonic() + self._patience
            self._changed.notify()

    def disarm(self) -> str:
        """Call the deadline off. Why the group was aborted; empty: it was not."""
        with self._changed:
            self._deadline = None
            return self._fired

    def fire(self, reason: str) -> None:
        with self._changed:
            self._fired = self._fired or reason
            self._changed.notify()

    def join(self) -> None:
        self._thread.join(self._patience)

    def _watch(self) -> None:
        with self._changed:
            while not self._fired:
                left = None if self._deadline is None else self._deadline - time.monotonic()
                if left is not None and left <= 0:
                    self._fired = f"a frame was not through after {self._patience:g} s"
                else:
                    self._changed.wait(left)
        group, self._group = self._group, None
        group.abort()
