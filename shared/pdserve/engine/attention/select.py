"""Which attention backend serves a device. Loads a backend's module, and its libraries, only when it is chosen."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch

from pdserve.core.errors import ConfigError
from pdserve.engine.attention.base import AttentionBackend, HeadShape
from pdserve.engine.native.build import NativeError


def select_backend(
    name: str, device: torch.device | str, dtype: torch.dtype, block_size: int, shape: HeadShape
) -> tuple[AttentionBackend, str]:
    """The backend and, for the log, why it was chosen.

    `name` is "auto", "torch", "native" or "flash". "auto" takes flash on GPUs and native on CPUs, where they work; a
    backend that is asked for by name and cannot work raises ConfigError, as does a block size that the chosen backend
    refuses.
    """
    device = torch.device(device)
    match name:
        case "torch":
            backend, reason = _torch(), "asked for by name"
        case "native" | "flash":
            found = _native(device, dtype, block_size, shape) if name == "native" else _flash(device, dtype, block_size)
            if isinstance(found, str):
                raise ConfigError(f"attention backend {name!r} cannot be used: {found}")
            backend, reason = found, "asked for by name"
        case "auto":
            best = "native" if device.type == "cpu" else "flash-attn"
            found = (
                _native(device, dtype, block_size, shape) if device.type == "cpu" else _flash(device, dtype, block_size)
            )
            backend, reason = (
                (_torch(), f"auto: no {best} since {found}")
                if isinstance(found, str)
                else (found, f"auto: {best} serves this device")
            )
        case _:
            raise ConfigError(f"attention backend {name!r} is unknown; there are 'auto', 'torch', 'native' and 'flash'")
    backend.check_block_size(block_size)
    return backend, reason


def _torch() -> AttentionBackend:
    backend: AttentionBackend = import_module("pdserve.engine.attention.torch_backend").Backend()
    return backend


def _native(device: torch.device, dtype: torch.dtype, block_size: int, shape: HeadShape) -> AttentionBackend | str:
    """The backend, or what stands in its way."""
    if device.type != "cpu":
        return f"the device is {device.type}"
    try:
        backend: AttentionBackend = import_module("pdserve.engine.attention.native_backend").Backend(
            shape, dtype, block_size
        )
    except (ConfigError, NativeError) as error:
        return str(error)
    return backend


def _flash(device: torch.device, dtype: torch.dtype, block_size: int) -> AttentionBackend | str:
    """The backend, or what stands in its way."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it needs float16 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    if block_size % 256:
        return f"it needs a block size that is a multiple of 256, not {block_size}"
    if find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    backend: AttentionBackend = import_module("pdserve.engine.attention.flash_backend").Backend()
    return backend
