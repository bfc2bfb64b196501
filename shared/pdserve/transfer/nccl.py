"""Links over NCCL: GPU memory to GPU memory, one communicator a direction, on streams of their own.

NCCL has no deadlines: a guard thread aborts the communicator when one passes, which ends the kernel that spins, and
with it the wait of the link's thread. Nothing here polls, and nothing waits on the stream that computes.
"""

from __future__ import annotations

import os
import re
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from pdserve.core.errors import ConfigError
from pdserve.transfer.nccl_environment import ENVIRONMENT, INIT_PATIENCE
from pdserve.transfer.transport import LinkLost, Work

MAX_CHANNELS = 4  # each takes an SM while a frame is under way, and memory in the communicator
HIGH = -1  # priority; see NcclTransport

_NO_LIMIT = timedelta(hours=1)  # ProcessGroupNCCL's own timeout, which only `abort` obeys without a watchdog


def require_nccl(device: str) -> None:
    """Raise ConfigError unless NCCL can serve `device` and a failed link would leave the process standing."""
    if torch.device(device).type != "cuda" or not dist.is_nccl_available():
        raise ConfigError(f"kv_transport nccl needs a CUDA device and a torch with NCCL; the device is {device}")
    for name, value in ENVIRONMENT.items():
        if os.environ.get(name) != value:
            raise ConfigError(f"kv_transport nccl needs {name}={value} in the environment before torch loads")


class NcclTransport:
    """A two-member group. Making it does not wait for the peer; the first operation does: warm it up at once.

    Non-blocking, so that an init whose peer never comes ends too. Its streams have high priority: they come from a pool
    of 32 that links have for themselves, since a stream that waits for a stopped peer holds up whoever shares it.
    Frames and ring live as long as the link, so the allocator never has to hold them back for a stream.
    """

    def __init__(self, store: Store, rank: int, timeout: timedelta, device: torch.device) -> None:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = _NO_LIMIT
        options.config.blocking = 0
        options.config.min_ctas = 1
        options.config.max_ctas = MAX_CHANNELS
        self.device = device
        self._peer = 1 - rank
        self._frame_patience = timeout.total_seconds()
        self._patience = max(INIT_PATIENCE, self._frame_patience)  # of the first operation
        self._outstanding: _NcclWork | None = None
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device, priority=HIGH)  # type: ignore[no-untyped-call]
            self._group: Any = dist.ProcessGroupNCCL(store, rank, 2, options)
        self._guard = _Guard(self._group)

    def send(self, tensor: torch.Tensor) -> Work:
        return self._post("send", tensor)

    def recv(self, tensor: torch.Tensor) -> Work:
        return self._post("recv", tensor)

    def abort(self) -> None:
        self._guard.fire("the link was closed")

    def close(self) -> None:
        """Aborts: that frees the communicator too, and unlike a proper shutdown it needs nobody at the other end.

        Waits for it however long it takes: until then the network may write into what was being received.
        """
        self._outstanding = None
        self._guard.fire("closed")
        self._guard.join()
        self._group = None

    def _post(self, operation: str, tensor: torch.Tensor) -> Work:
        if not tensor.is_contiguous() or tensor.device != self.device:
            raise ValueError(f"{operation} of a tensor that is not contiguous on {self.device}")
        if self._outstanding is not None and not self._outstanding.done:
            raise ValueError(f"{operation} while another operation of this direction is outstanding")
        if fired := self._guard.arm(self._patience):  # the first operation waits for the peer inside the call
            raise LinkLost(fired)
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                # NCCL's stream waits for ours and ours for it; the host waits for neither, as `wait` would make it.
                getattr(self._group, operation)([tensor], self._peer, 0).synchronize()
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                event.record(self._stream)
        except RuntimeError as error:
            raise LinkLost(self._guard.disarm() or explain(error)) from error
        if self._guard.fired:  # it may have come before there was a communicator to abort
            _abort(self._group)
        self._outstanding = _NcclWork(event, self._guard, self._patience)
        self._patience = self._frame_patience
        return self._outstanding


class _NcclWork:
    def __init__(self, event: torch.cuda.Event, guard: _Guard, patience: float) -> None:
        self._event, self._guard, self._patience = event, guard, patience
        self.done = False

    def wait(self) -> None:
        self._guard.arm(self._patience)
        try:
            self._event.synchronize()
        except RuntimeError as error:
            raise LinkLost(self._guard.disarm() or explain(error)) from error
        if fired := self._guard.disarm():  # an aborted kernel completes its event too
            raise LinkLost(fired)
        self.done = True


class _Guard:
    """Aborts a group, from a thread of its own, when an operation's deadline passes or when told to."""

    def __init__(self, group: Any) -> None:
        self.fired = ""  # why the group was aborted; empty: it was not
        self._group = group
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._patience = 0.0
        self._thread = threading.Thread(target=self._watch, name="kv-nccl-guard", daemon=True)
        self._thread.start()

    def arm(self, patience: float) -> str:
        """Start the deadline anew, in seconds. Returns `fired`."""
        with self._changed:
            self._patience, self._deadline = patience, time.monotonic() + patience
            self._changed.notify()
            return self.fired

    def disarm(self) -> str:
        """Call the deadline off. Returns `fired`."""
        with self._changed:
            self._deadline = None
            return self.fired

    def fire(self, reason: str) -> None:
        with self._changed:
            self.fired = self.fired or reason
            self._changed.notify()

    def join(self) -> None:
        """Wait until the group is aborted; `fire` it first."""
        self._thread.join()

    def _watch(self) -> None:
        with self._changed:
            while not self.fired:
                left = None if self._deadline is None else self._deadline - time.monotonic()
                if left is not None and left <= 0:
                    self.fired = f"a frame was not through after {self._patience:g} s"
                else:
                    self._changed.wait(left)
        group, self._group = self._group, None
        _abort(group)


def _abort(group: Any) -> None:
    with suppress(RuntimeError):  # of a communicator that had failed already; it is gone all the same
        group.abort()


def explain(error: BaseException) -> str:
    """NCCL's words in one line, without where in torch's source they were noticed."""
    text = str(error).partition("Exception raised from")[0]
    lines = [re.sub(r"^NCCL error in: \S+, ", "NCCL error: ", line.strip()) for line in text.splitlines()]
    return "; ".join(line for line in lines if line and line != "Last error:")[:300]
