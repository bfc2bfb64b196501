"""Which way the bytes of a link take, and whether a faster one was there. Knows no torch: the front asks.

For NCCL this is what it will choose by its documented rules, not what it chose: its own word is only in its log
(NCCL_DEBUG=INFO, the lines with "via"), where nothing tells one link's communicator from another's.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as File
from typing import Protocol

_INFINIBAND = File("/sys/class/infiniband")
# What makes NCCL go another way: variables, and the values that do, in capitals.
_NO_P2P = {"NCCL_P2P_DISABLE": ("1",), "NCCL_P2P_LEVEL": ("0", "LOC")}
_NO_SHM = {"NCCL_SHM_DISABLE": ("1",)}
_NO_RDMA = {"NCCL_IB_DISABLE": ("1",), "NCCL_NET": ("SOCKET",)}
_UUID_BYTES = 96
_NVML_CAN = {2: "nvlink", 0: "p2p"}  # nvmlGpuP2PCapsIndex_t: by NVLink, and reading at all; the best first


class End(Protocol):
    """What a worker's hello says of where it is. `device` is "cpu", or "cuda:0 (UUID)"."""

    @property
    def device(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def rdma_devices(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Facts:
    """What this machine says. `peers`: how our GPU reaches others of the node, by UUID: "nvlink", "p2p" or "none"."""

    rdma_devices: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    peers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Path:
    """`name`: nvlink, p2p, same-gpu, shared-memory, infiniband, sockets or loopback. `degraded`: why it is not the one
    to expect between such machines; empty: it is. `expected`: predicted, see above."""

    name: str
    degraded: str = ""
    expected: bool = False


def describe_path(kind: str, ours: End, theirs: End, facts: Facts) -> Path:
    """The path of a link over the transport `kind`."""
    near = ours.node == theirs.node
    both_gpus = ours.device.startswith("cuda") and theirs.device.startswith("cuda")
    if kind == "cuda-ipc":
        return Path("same-gpu")
    if kind == "nccl":
        return _nccl_near(ours, theirs, facts) if near else _nccl_far(ours, theirs, facts)
    name = "loopback" if near else "sockets"
    if both_gpus:
        return Path(name, "gloo takes the KV of two GPUs through host memory")
    return Path(name, "" if near else _unused_rdma(ours, theirs, "gloo does not use them"))


def gpu_of(device: str) -> str:
    """A GPU's UUID, which two processes may know by different numbers; empty where a device tells none."""
    return device.partition(" ")[2].strip("()")


def local_facts(device: str, infiniband: File = _INFINIBAND, environment: Mapping[str, str] | None = None) -> Facts:
    """Ask this machine, once, at the start. `device` is this worker's."""
    environment = os.environ if environment is None else environment
    rdma = tuple(sorted(entry.name for entry in infiniband.iterdir())) if infiniband.is_dir() else ()
    peers = _peers(gpu_of(device)) if device.startswith("cuda") else {}
    relevant = [*_NO_P2P, *_NO_SHM, *_NO_RDMA]
    return Facts(rdma, {name: environment[name] for name in relevant if name in environment}, peers)


def _nccl_near(ours: End, theirs: End, facts: Facts) -> Path:
    way = facts.peers.get(gpu_of(theirs.device), "p2p")  # unknown where a container shows one GPU only: NCCL will try
    off = _switched(facts, _NO_P2P)
    if way != "none" and not off:
        return Path(way, expected=True)
    why = off or f"no peer access between {ours.device} and {theirs.device}"
    if not (no_shm := _switched(facts, _NO_SHM)):
        return Path("shared-memory", why, expected=True)
    return Path(_nccl_far(ours, theirs, facts).name, f"{why}, {no_shm}", expected=True)


def _nccl_far(ours: End, theirs: End, facts: Facts) -> Path:
    off = _switched(facts, _NO_RDMA)
    if ours.rdma_devices and theirs.rdma_devices and not off:
        return Path("infiniband", expected=True)
    return Path("sockets", _unused_rdma(ours, theirs, off), expected=True)


def _unused_rdma(ours: End, theirs: End, why: str) -> str:
    """The reason why sockets are a pity; empty where one of the two has nothing better."""
    if not (ours.rdma_devices and theirs.rdma_devices):
        return ""
    here, there = ", ".join(ours.rdma_devices), ", ".join(theirs.rdma_devices)
    return f"sockets between nodes that both have RDMA devices ({here}; {there}): {why}"


def _switched(facts: Facts, switches: Mapping[str, tuple[str, ...]]) -> str:
    """The first of these variables that has one of its values, as "NAME=value"; empty: none has."""
    env = facts.environment
    return next((f"{name}={env[name]}" for name in switches if env.get(name, "").upper() in switches[name]), "")


def _peers(ours: str) -> dict[str, str]:
    """How the GPU with the UUID `ours` reaches each other one here, as the driver's management library says.

    Not torch, which the front never loads, and which sees no GPU that this worker was not given. Empty without it.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() != 0:
            return {}
    except (OSError, AttributeError):
        return {}
    handles = dict(_gpus(library))
    mine = handles.pop(ours, None)
    found = {} if mine is None else {uuid: _reach(library, mine, other) for uuid, other in handles.items()}
    library.nvmlShutdown()
    return {uuid: way for uuid, way in found.items() if way}


def _gpus(library: ctypes.CDLL) -> list[tuple[str, ctypes.c_void_p]]:
    count, found = ctypes.c_uint(), list[tuple[str, ctypes.c_void_p]]()
    library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
        if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) == 0:
            library.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(_UUID_BYTES))
            found.append((uuid.value.decode().removeprefix("GPU-"), handle))
    return found


def _reach(library: ctypes.CDLL, one: ctypes.c_void_p, other: ctypes.c_void_p) -> str:
    """The best way that works; empty where the library does not know."""
    status = ctypes.c_int()
    for capability, name in _NVML_CAN.items():
        code = library.nvmlDeviceGetP2PStatus(one, other, ctypes.c_int(capability), ctypes.byref(status))
        if code != 0:
            return ""
        if status.value == 0:  # NVML_P2P_STATUS_OK
            return name
    return "none"
