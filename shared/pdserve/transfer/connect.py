"""Making one direction of a link: which transport, and its first operation."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from pdserve.core.errors import ConfigError
from pdserve.transfer.cuda_ipc import CudaIpcTransport, CudaMemory, require_cuda_ipc
from pdserve.transfer.gloo import GlooTransport
from pdserve.transfer.nccl import NcclTransport, require_nccl
from pdserve.transfer.transport import Transport

_WARM_UP_BYTES = 64

Connect = Callable[[Store, int, timedelta], Transport]


def warm_up(transport: Transport, sends: bool) -> None:
    """Send one small tensor through: connections and communicators are made by the first operation."""
    tensor = torch.zeros(_WARM_UP_BYTES, dtype=torch.uint8, device=transport.device)
    (transport.send if sends else transport.recv)(tensor).wait()


def transports_on(device: torch.device) -> list[str]:
    """What may link a worker on `device`, the fastest first."""
    return ["cuda-ipc", "nccl", "gloo"] if device.type == "cuda" else ["gloo"]


def require(setting: str, device: str) -> None:
    """Raise ConfigError where the setting `kv_transport` cannot work on `device`; before any link is made."""
    cuda = torch.device(device).type == "cuda"
    if setting == "nccl" or (setting == "auto" and cuda):
        require_nccl(device)
    if setting == "cuda-ipc" or (setting == "auto" and cuda):
        require_cuda_ipc(device)


def connector(kind: str, device: str, hostname: str, interface: str) -> Connect:
    """How to make one direction of a link: (store, own rank of 0 and 1, timeout) -> Transport.

    `hostname` or `interface` names where Gloo listens. Raises ConfigError for a transport that cannot run here.
    """

    def gloo(store: Store, rank: int, timeout: timedelta) -> GlooTransport:
        return GlooTransport(store, rank, timeout, hostname, interface)

    def nccl(store: Store, rank: int, timeout: timedelta) -> NcclTransport:
        return NcclTransport(store, rank, timeout, torch.device(device))

    def cuda_ipc(store: Store, rank: int, timeout: timedelta) -> CudaIpcTransport:
        memory = CudaMemory(torch.device(device))
        return CudaIpcTransport(gloo(store, rank, timeout), memory, torch.device(device))

    makers: dict[str, Connect] = {"gloo": gloo, "nccl": nccl, "cuda-ipc": cuda_ipc}
    if kind not in makers:
        raise ConfigError(f"kv_transport is {', '.join(makers)}, not {kind!r}")
    require(kind, device)
    return makers[kind]
