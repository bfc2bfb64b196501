"""Which attention backend serves a device. Loads a backend's module, and its libraries, only when it is chosen."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch

from pdserve.core.errors import ConfigError
from pdserve.engine.attention.base import AttentionBackend


def select_backend(
    name: str, device: torch.device | str, dtype: torch.dtype, block_size: int
) -> tuple[AttentionBackend, str]:
    """The backend and, for the log, why it was chosen.

    `name` is "auto", "torch" or "flash". "auto" takes flash where it works; a backend that is asked for by name and
    cannot work raises ConfigError, as does a block size that the chosen backend refuses.
    """
    obstacle = _flash_obstacle(torch.device(device), dtype, block_size) if name in ("auto", "flash") else None
    match name:
        case "flash" if obstacle:
            raise ConfigError(f"attention backend 'flash' cannot be used: {obstacle}")
        case "flash" | "torch":
            reason = "asked for by name"
        case "auto":
            reason = f"auto: no flash-attn since {obstacle}" if obstacle else "auto: flash-attn serves this device"
            name = "torch" if obstacle else "flash"
        case _:
            raise ConfigError(f"attention backend {name!r} is unknown; there are 'auto', 'torch' and 'flash'")
    backend: AttentionBackend = import_module(f"pdserve.engine.attention.{name}_backend").Backend()
    backend.check_block_size(block_size)
    return backend, reason


def _flash_obstacle(device: torch.device, dtype: torch.dtype, block_size: int) -> str | None:
    if device.type != "cuda":
        return f"the device is {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it needs float16 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    if block_size % 256:
        return f"it needs a block size that is a multiple of 256, not {block_size}"
    if find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    return None
