"""From settings to an engine: device, dtype, memory and attention are chosen here, and each choice says why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from pdserve.core.errors import ConfigError
from pdserve.core.layout import DTYPE_BYTES, TRANSFER_DTYPES, KVLayout
from pdserve.engine.attention import HeadShape, select_backend
from pdserve.engine.config import ModelConfig
from pdserve.engine.engine import Engine, LayerListener
from pdserve.engine.fingerprint import model_fingerprint
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.linear import cpu_multiplies
from pdserve.engine.model import CausalLM
from pdserve.engine.native.build import NativeError
from pdserve.engine.native_linear import choose_matrices
from pdserve.engine.pointwise import NativePointwise, Pointwise, TorchPointwise
from pdserve.engine.runner import Runner
from pdserve.engine.scheduler import SchedulerConfig
from pdserve.engine.weights import load_weights

MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine is built from. 0 means: choose (`kv_cache_bytes` from `memory_share`, lengths from the model)."""

    model: Path
    dtype: str = "auto"
    device: str = "auto"
    block_size: int = 16
    kv_cache_bytes: int = 0
    memory_share: float = 0.1
    max_model_len: int = 0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    lookahead_tokens: int = 64
    attention_backend: str = "auto"
    prefix_caching: bool = True
    transfer_dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and what was chosen for it; `notes` is for the log."""

    engine: Engine
    kv: KVCache
    layout: KVLayout
    config: ModelConfig
    max_model_len: int
    device: torch.device
    notes: dict[str, str] = field(default_factory=dict)


def build_engine(
    options: EngineOptions,
    on_layer: LayerListener | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> BuiltEngine:
    """Load a model folder and set up its pages. `progress` gets a stage's name and the share of it that is done.

    Raises ModelError for a folder that cannot be served and ConfigError for settings that cannot work.
    """
    config = ModelConfig.load(options.model)
    device = choose_device(options.device)
    dtype, why = choose_dtype(options.dtype, config.dtype, device)
    max_model_len = _max_model_len(options.max_model_len, config.max_position_embeddings)
    shape = HeadShape(config.num_heads, config.num_kv_heads, config.head_size)
    backend, reason = select_backend(options.attention_backend, device, dtype, options.block_size, shape)
    pointwise, pointwise_note = choose_pointwise(backend.name, config, shape, dtype)
    model = CausalLM(config, backend, dtype, device, max_model_len, pointwise)
    travels = "" if options.transfer_dtype == "auto" else options.transfer_dtype
    if travels not in TRANSFER_DTYPES:
        raise ConfigError(f"kv_transfer_dtype {travels!r} is unknown; use auto, int8 or fp8")
    layout = replace(model.layout(options.block_size, model_fingerprint(options.model)), transfer_dtype=travels)
    load_weights(model, options.model, progress and (lambda done, total: progress("weights", done / total)))
    matrices, order = choose_matrices(backend.name, dtype, device)
    if matrices is not None:
        model.pack(matrices)
    num_blocks, memory_note = _num_blocks(options, layout, device, max_model_len)
    kv = KVCache(layout, num_blocks, device)
    runner = Runner(model, kv, backend, device)
    scheduler = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        lookahead_tokens=options.lookahead_tokens,
        watermark_blocks=max(1, num_blocks // 100),
        prefix_caching=options.prefix_caching,
    )
    notes = {
        "dtype": f"{str(dtype).removeprefix('torch.')}, {why}",
        "attention": f"{backend.name}, {reason}",
        "matrices": order,
        "pointwise": pointwise_note,
        "kv_memory": memory_note,
        "kv_layout": layout.describe(),
    }
    engine = Engine(runner, layout, scheduler, on_layer)
    return BuiltEngine(engine, kv, layout, config, max_model_len, device, notes)


def choose_device(name: str) -> torch.device:
    """ "auto" takes the first CUDA device, else the CPU. Raises ConfigError for a device that is not there."""
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"device {name!r} is not here: {torch.cuda.device_count()} CUDA devices are visible")
        torch.cuda.set_device(device)
    return device


def choose_dtype(name: str, stored: str, device: torch.device) -> tuple[torch.dtype, str]:
    """What to compute in, and why. "auto" takes the dtype that the weights are stored in, but on a CPU that cannot
    multiply halves float32: measured on one with AVX2 alone, a prompt in bfloat16 takes seven times as long.

    Raises ConfigError for a dtype that cannot work.
    """
    reason = "asked for"
    if name == "auto":
        name, reason = stored, "auto: as the weights are stored"
        if device.type == "cpu" and stored in ("bfloat16", "float16") and not cpu_multiplies(getattr(torch, stored)):
            name, reason = "float32", f"auto: this CPU has no fast {stored}"
    if name not in DTYPE_BYTES:
        raise ConfigError(f"dtype {name!r} is unknown; use auto or one of {', '.join(DTYPE_BYTES)}")
    return getattr(torch, name), reason


def choose_pointwise(
    attention: str, config: ModelConfig, shape: HeadShape, dtype: torch.dtype
) -> tuple[Pointwise, str]:
    """Kernels where attention has them too and the model's widths fit, and why."""
    if attention != "native":
        return TorchPointwise(), f"torch, as attention is {attention}"
    try:
        widths = (config.hidden_size, config.intermediate_size)
        return NativePointwise(shape, widths, dtype), "native, as attention is"
    except (ConfigError, NativeError) as error:
        return TorchPointwise(), f"torch: {error}"


def _max_model_len(asked: int, trained: int) -> int:
    if asked > trained:
        raise ConfigError(f"max_model_len {asked} is beyond the {trained} positions of the model")
    return asked or trained


def _num_blocks(options: EngineOptions, layout: KVLayout, device: torch.device, max_model_len: int) -> tuple[int, str]:
    """How many pages there are, and a sentence about it. One sequence of full length must fit."""
    free = free_memory(device)
    memory = options.kv_cache_bytes or int(free * options.memory_share)
    num_blocks = KVCache.num_blocks_for(memory, layout)
    source = "asked for" if options.kv_cache_bytes else f"{options.memory_share:.0%} of {free / 2**30:.1f} GiB free"
    note = f"{memory / 2**20:.0f} MiB ({source}): {num_blocks} blocks of {layout.block_size} tokens"
    needed = layout.blocks_for(max_model_len)
    if num_blocks < needed:
        raise ConfigError(
            f"KV memory is {note}, but one sequence of max_model_len {max_model_len} needs {needed}: "
            "give more memory or a smaller max_model_len"
        )
    return num_blocks, note


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if MEMINFO.exists():
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise ConfigError("free memory cannot be read on this system: set kv_cache_memory in bytes")
