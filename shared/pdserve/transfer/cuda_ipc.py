"""Links between two workers on one GPU, for which NCCL makes no communicator: the sender copies into the receiver.

The receiver exports a landing, memory of one frame, by its IPC handle. Two signals go with a frame, over a Gloo pair,
which brings the deadline and wakes when the peer dies: the receiver's "ready", which carries the handle, and the
sender's "done", once its host saw the copy complete. Then the receiver copies on to where the frame is wanted. That the
sender has let go of the landing is told by its closing the pair, as it does after unmapping, or by its death.

Why not straight into the ring: the receiver cannot revoke what it allowed. A sender that is stopped after "ready" and
goes on minutes later still copies, and must hit nothing that another link was given meanwhile. So a landing belongs to
one link, and is freed only once the sender is known to have unmapped it, or to be gone. The second copy costs about a
microsecond. Why the host confirms, and no interprocess event: the wait for one that a dying process recorded has no
deadline.
"""

from __future__ import annotations

import ctypes
import struct
from contextlib import suppress
from typing import Any, Protocol

import structlog
import torch

from pdserve.core.errors import ConfigError
from pdserve.transfer.transport import LinkLost, PeerGone, Transport, Work

_READY = struct.Struct("<64sQQ")  # the landing's handle, its bytes, the frame's bytes
_DONE = struct.Struct("<Q")  # the frame's bytes
BLOCK = 2 << 20  # CUDA shares whole blocks of this size, so a landing is made of whole ones
HANDLE_BYTES = 64


class DeviceMemory(Protocol):
    """Memory that another process can map; addresses are this process's. All methods raise LinkLost on failure."""

    def allocate(self, size: int) -> int: ...
    def free(self, address: int) -> None: ...
    def export(self, address: int) -> bytes:
        """The handle, of HANDLE_BYTES, by which another process can `map` an allocation."""

    def map(self, handle: bytes) -> int: ...
    def unmap(self, address: int) -> None: ...
    def write(self, address: int, tensor: torch.Tensor) -> None:
        """Copy `tensor` there, and return when it is done."""

    def read(self, tensor: torch.Tensor, address: int) -> None:
        """Fill `tensor` from there, and return when it is done."""


log = structlog.get_logger(__name__)


class CudaIpcTransport:
    """One direction. `signals` is a pair of its own, which this closes. Either sends or receives, never both."""

    def __init__(self, signals: Transport, memory: DeviceMemory, device: torch.device) -> None:
        self.device = device
        self.quarantined = 0  # bytes of landings that were never freed, because the sender may still write there
        self._signals, self._memory = signals, memory
        self._outstanding: _Send | _Receive | None = None
        # The sending side.
        self._mapped: tuple[bytes, int] | None = None  # (handle, address)
        # The receiving side.
        self._landings: list[tuple[int, int]] = []  # (address, bytes); the last one is used, the others were too small
        self._done = torch.empty(_DONE.size, dtype=torch.uint8)
        self._coming: Work | None = None  # the receive of a "done"
        self._lost: LinkLost | None = None

    def send(self, tensor: torch.Tensor) -> Work:
        self._check("send", tensor)
        ready = torch.empty(_READY.size, dtype=torch.uint8)
        self._outstanding = _Send(self, tensor, ready, self._signals.recv(ready))
        return self._outstanding

    def recv(self, tensor: torch.Tensor) -> Work:
        self._check("recv", tensor)
        try:
            address, capacity = self._landing(tensor.nbytes)
            self._coming = self._signals.recv(self._done)
            ready = self._signals.send(_pack(_READY, self._memory.export(address), capacity, tensor.nbytes))
        except LinkLost as error:
            self._lost = error
            raise
        self._outstanding = _Receive(self, tensor, address, ready)
        return self._outstanding

    def abort(self) -> None:
        """Nothing to do: every wait is for a signal, and ends at its deadline or when the peer closes its end."""

    def close(self) -> None:
        """The sender unmaps. The receiver waits until it has, up to a deadline, and frees its landing."""
        self._outstanding = None
        try:
            with suppress(LinkLost):
                self._unmap()
                if self._landings and self._sender_let_go():
                    self._free(keep=0)
            self.quarantined = sum(size for _, size in self._landings)
            if self.quarantined:
                log.warning("landing_quarantined", bytes=self.quarantined, reason="the sender may still write there")
        finally:
            self._coming = None
            self._signals.close()

    def map(self, handle: bytes) -> int:
        """The address of the peer's landing here; a new one takes the place of the one before it."""
        if self._mapped is None or self._mapped[0] != handle:
            self._unmap()
            self._mapped = handle, self._memory.map(handle)
        return self._mapped[1]

    def copy_out(self, tensor: torch.Tensor, ready: torch.Tensor) -> None:
        """The receiver is ready: copy the frame there, and tell."""
        handle, capacity, size = _READY.unpack(_bytes(ready))
        if not tensor.nbytes == size <= capacity:
            raise LinkLost(f"a frame of {tensor.nbytes} bytes, but the peer receives {size} into {capacity}")
        self._memory.write(self.map(handle), tensor)
        self._signals.send(_pack(_DONE, size)).wait()

    def copy_in(self, tensor: torch.Tensor, address: int, ready: Work) -> None:
        """Wait for the sender to be done, and take the frame."""
        size = self._next_signal()
        ready.wait()  # it is: the sender took it
        if size != tensor.nbytes:
            raise LinkLost(f"the peer sent a frame of {size} bytes, not of {tensor.nbytes}")
        self._free(keep=1)  # whatever landing came before: the sender has unmapped it
        self._memory.read(tensor, address)

    def _check(self, operation: str, tensor: torch.Tensor) -> None:
        if not tensor.is_contiguous() or tensor.device != self.device:
            raise ValueError(f"{operation} of a tensor that is not contiguous on {self.device}")
        if self._outstanding is not None and not self._outstanding.done:
            raise ValueError(f"{operation} while another operation of this direction is outstanding")

    def _landing(self, size: int) -> tuple[int, int]:
        if not self._landings or self._landings[-1][1] < size:
            capacity = -(-size // BLOCK) * BLOCK
            self._landings.append((self._memory.allocate(capacity), capacity))
        return self._landings[-1]

    def _free(self, keep: int) -> None:
        while len(self._landings) > keep:
            self._memory.free(self._landings.pop(0)[0])

    def _unmap(self) -> None:
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            self._memory.unmap(mapped[1])

    def _next_signal(self) -> int:
        try:
            work, self._coming = self._coming or self._signals.recv(self._done), None
            work.wait()
        except LinkLost as error:
            self._lost = error
            raise
        return int(_DONE.unpack(_bytes(self._done))[0])

    def _sender_let_go(self) -> bool:
        with suppress(LinkLost):
            while self._lost is None:
                self._next_signal()  # of a frame that nobody waited for any more, or the end
        return isinstance(self._lost, PeerGone)


class _Send:
    def __init__(self, owner: CudaIpcTransport, tensor: torch.Tensor, ready: torch.Tensor, signal: Work) -> None:
        self._owner, self._tensor, self._ready, self._signal = owner, tensor, ready, signal
        self.done = False

    def wait(self) -> None:
        self._signal.wait()
        self._owner.copy_out(self._tensor, self._ready)
        self.done = True


class _Receive:
    def __init__(self, owner: CudaIpcTransport, tensor: torch.Tensor, address: int, ready: Work) -> None:
        self._owner, self._tensor, self._address, self._ready = owner, tensor, address, ready
        self.done = False

    def wait(self) -> None:
        self._owner.copy_in(self._tensor, self._address, self._ready)
        self.done = True


class CudaMemory:
    """DeviceMemory by way of the CUDA driver, in the context that torch uses; copies run on a stream of their own.

    Not torch's own sharing of storages: that maps whole segments of its allocator, with whatever else is in them, and
    keeps counters in shared memory under a name that the peer would tell us.
    """

    def __init__(self, device: torch.device) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._context = ctypes.c_void_p()
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            number, handle = torch.cuda.current_device(), ctypes.c_int()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(number))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)  # for good, as torch does

    def allocate(self, size: int) -> int:
        address = ctypes.c_uint64()
        self._here("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        self._here("cuMemFree_v2", ctypes.c_uint64(address))

    def export(self, address: int) -> bytes:
        handle = _IpcHandle()
        self._here("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def map(self, handle: bytes) -> int:
        address, lazily = ctypes.c_uint64(), ctypes.c_uint(1)  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag
        self._here("cuIpcOpenMemHandle_v2", ctypes.byref(address), _IpcHandle.from_buffer_copy(handle), lazily)
        return address.value

    def unmap(self, address: int) -> None:
        self._here("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def write(self, address: int, tensor: torch.Tensor) -> None:
        self._copy(address, tensor.data_ptr(), tensor.nbytes)

    def read(self, tensor: torch.Tensor, address: int) -> None:
        self._copy(tensor.data_ptr(), address, tensor.nbytes)

    def _copy(self, target: int, source: int, size: int) -> None:
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        addresses = ctypes.c_uint64(target), ctypes.c_uint64(source)
        self._here("cuMemcpyDtoDAsync_v2", *addresses, ctypes.c_size_t(size), stream)
        try:
            self._event.record(self._stream)
            self._event.synchronize()
        except RuntimeError as error:
            raise LinkLost(str(error).partition("\n")[0]) from error

    def _here(self, function: str, *arguments: Any) -> None:
        """Call into the driver with torch's context current, which it may not be yet in this thread."""
        self._call("cuCtxSetCurrent", self._context)
        self._call(function, *arguments)

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._driver, function)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
            raise LinkLost(f"{function}: {(text.value or b'unknown error').decode()} ({code})")


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


def require_cuda_ipc(device: str) -> None:
    """Raise ConfigError unless `device` is a GPU whose driver is here."""
    if torch.device(device).type != "cuda":
        raise ConfigError(f"kv_transport cuda-ipc needs a CUDA device; the device is {device}")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError(f"kv_transport cuda-ipc needs the CUDA driver: {error}") from error


def _pack(layout: struct.Struct, *values: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(layout.pack(*values)), dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.tolist())
