"""Settings of prefill and decode workers, and what the engine process gets of them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field, field_validator

from pdserve.rpc.server import data_host
from pdserve.rpc.settings import CallingSettings, Endpoint, FleetSettings
from pdserve.worker.messages import EngineSettings

# Shares of memory: of a GPU that a worker has for itself; of a machine's free memory that it shares with everybody.
GPU_SHARE = 0.9
CPU_SHARE = 0.15
# Tokens a step: a step of a small model takes tens of milliseconds on two cores at 512, on a GPU at 4096.
CPU_BATCHED_TOKENS = 512
GPU_BATCHED_TOKENS = 4096
FLASH_PAGE = 256  # as in engine.attention.flash_backend, which needs torch to be imported


class WorkerSettings(FleetSettings, CallingSettings):
    """vLLM's names where it has one. Sizes take units ("1GiB")."""

    model: str = Field(description="folder, hub id or smollm2-135m-instruct")
    revision: str | None = Field(None, description="branch, tag or commit of a hub id")
    served_model_name: str | None = Field(
        None, description="name that clients use; default: the folder's name, or the id"
    )
    worker_id: str | None = Field(None, description="name in the fleet; default: the role and random digits")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="dtype of weights and KV")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda|cuda:\d+)$", description="auto, cpu, cuda or cuda:N")
    threads: int = Field(0, ge=0, description="threads that compute on a CPU; 0: one for each given core")
    cores: str = Field("", description='cores for this worker, such as "0,1"; empty: all that the process may use')
    front_cores: str = Field("", description="cores for the process that does gRPC; empty: those of the engine")
    block_size: int = Field(16, ge=1, le=4096, description="tokens in a KV block")
    kv_cache_memory: ByteSize = Field(
        ByteSize(0), description="bytes for KV blocks; 0: a share of memory, see gpu-memory-utilization"
    )
    gpu_memory_utilization: float | None = Field(
        None, gt=0, le=1, description=f"share of the GPU ({GPU_SHARE}), or of a CPU's free memory ({CPU_SHARE})"
    )
    max_model_len: int = Field(0, ge=0, description="longest sequence in tokens; 0: the model's own")
    max_num_seqs: int = Field(256, ge=1, description="most sequences that run at once")
    max_num_batched_tokens: int = Field(
        0, ge=0, description=f"most tokens in a step; 0: {CPU_BATCHED_TOKENS}, on a GPU {GPU_BATCHED_TOKENS}"
    )
    lookahead_tokens: int = Field(64, ge=0, description="answer tokens that a reservation has room for")
    attention_backend: Literal["auto", "torch", "native", "flash"] = Field(
        "auto", description="attention kernels; auto: the best that is here"
    )
    kv_transport: Literal["auto", "nccl", "gloo", "cuda-ipc"] = Field(
        "auto", description="how KV moves between workers; auto: cuda-ipc on one GPU, nccl between two, else gloo"
    )
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs per worker; only 1 is supported")
    kv_host: str | None = Field(
        None, description="address to bind for KV links; default: --host, or the address that traffic leaves from"
    )
    kv_transfer_dtype: Literal["auto", "int8", "fp8"] = Field(
        "auto", description="how KV travels: auto, as it is; int8 or fp8, one byte a number with scales"
    )
    kv_checksum: bool = Field(False, description="check frames by CRC-32; TCP, InfiniBand and NVLink do so themselves")
    frame_bytes: ByteSize = Field(ByteSize(1 << 20), gt=0, description="most KV bytes in one frame")
    ring_bytes: ByteSize = Field(ByteSize(64 << 20), gt=0, description="staging memory for frames")
    frame_target_bytes: ByteSize = Field(
        ByteSize(256 << 10), gt=0, description="frames below it wait while the next layer may still join them"
    )
    frame_timeout: float = Field(2.0, gt=0, description="seconds that a frame may take")
    enable_prefix_caching: bool = Field(True, description="reuse KV of equal prompt beginnings")
    prefix_cache: Endpoint | None = Field(None, description="host:port of a prefix-cache service")
    engine_stall_seconds: float = Field(
        30.0, gt=0, description="silence of the engine after which this worker leaves the view until it answers again"
    )
    step_log: Path | None = Field(None, description="file for the times of steps and hand-offs, written at the end")

    @field_validator("cores", "front_cores")
    @classmethod
    def _check_cores(cls, value: str) -> str:
        cores = parse_cores(value)
        if len(set(cores)) < len(cores):
            raise ValueError("names a core twice")
        missing = set(cores) - available_cores()
        if missing:
            raise ValueError(f"cores {sorted(missing)} are not among those this process may use")
        return value

    @field_validator("tensor_parallel_size")
    @classmethod
    def _check_parallel(cls, value: int) -> int:
        if value > 1:
            raise ValueError(f"{value} is not supported yet; only 1 is")
        return value

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.revision and Path(self.model).expanduser().is_dir():
            yield f"revision {self.revision} is for hub ids, and model {self.model} is a folder"
        if self.ring_bytes < 2 * self.frame_bytes:
            yield f"ring-bytes {self.ring_bytes} must hold two frames at least, and frame-bytes is {self.frame_bytes}"
        if "frame_target_bytes" in self.model_fields_set and self.frame_target_bytes > self.frame_bytes:
            yield f"frame-target-bytes {self.frame_target_bytes} is above frame-bytes {self.frame_bytes}"
        if self.kv_cache_memory and self.gpu_memory_utilization:
            yield "kv-cache-memory and gpu-memory-utilization both say how much memory KV takes; leave one out"
        if self.prefix_cache and not self.enable_prefix_caching:
            yield f"prefix-cache {self.prefix_cache} is never asked with no-enable-prefix-caching"
        if self.core_list and self.threads > len(self.core_list):
            yield f"threads {self.threads} would fight over cores {self.cores}"
        if self.device == "cpu" and self.kv_transport in ("nccl", "cuda-ipc"):
            yield f"kv-transport {self.kv_transport} moves KV between GPUs, and device is cpu"
        if self.attention_backend == "native" and self.device.startswith("cuda"):
            yield f"attention-backend native is for CPUs, and device is {self.device}"
        if self.attention_backend == "flash":
            yield from self._flash_contradictions()

    def _flash_contradictions(self) -> Iterator[str]:
        if self.device == "cpu":
            yield "attention-backend flash needs a GPU, and device is cpu"
        if self.dtype == "float32":
            yield "attention-backend flash takes float16 and bfloat16, and dtype is float32"
        if self.block_size % FLASH_PAGE:
            yield f"attention-backend flash wants multiples of {FLASH_PAGE}, and block-size is {self.block_size}"

    @property
    def model_name(self) -> str:
        folder = Path(self.model).expanduser()
        return self.served_model_name or (
            folder.resolve().name if folder.is_dir() or folder.is_absolute() else self.model
        )

    @property
    def core_list(self) -> tuple[int, ...]:
        return parse_cores(self.cores)

    @property
    def front_core_list(self) -> tuple[int, ...]:
        return parse_cores(self.front_cores) or self.core_list

    @property
    def thread_count(self) -> int:
        return self.threads or len(self.core_list) or len(available_cores())

    @property
    def expects_gpu(self) -> bool:
        """Whether defaults are a GPU's. Decided without torch, which the front never loads."""
        return self.device.startswith("cuda") or (self.device == "auto" and Path("/dev/nvidiactl").exists())

    def name_worker(self, role: str) -> str:
        """The worker's id; made up where none was given, so call it once."""
        return self.worker_id or f"{role}-{secrets.token_hex(4)}"

    def for_engine(self, role: str) -> EngineSettings:
        """What the engine process of a `role` ("prefill" or "decode") is given."""
        gpu = self.expects_gpu
        return EngineSettings(
            role=role,
            model=str(Path(self.model).expanduser()),
            revision=self.revision or "",
            dtype=self.dtype,
            device=self.device,
            threads=self.thread_count,
            cores=self.core_list,
            block_size=self.block_size,
            kv_cache_bytes=int(self.kv_cache_memory),
            memory_share=self.gpu_memory_utilization or (GPU_SHARE if gpu else CPU_SHARE),
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens or (GPU_BATCHED_TOKENS if gpu else CPU_BATCHED_TOKENS),
            lookahead_tokens=self.lookahead_tokens,
            attention_backend=self.attention_backend,
            kv_transport=self.kv_transport,
            kv_host=self.kv_host or data_host(self.host),
            frame_bytes=int(self.frame_bytes),
            ring_bytes=int(self.ring_bytes),
            frame_timeout=self.frame_timeout,
            target_bytes=int(self.frame_target_bytes),
            kv_transfer_dtype=self.kv_transfer_dtype,
            kv_checksum=self.kv_checksum,
            enable_prefix_caching=self.enable_prefix_caching,
            log_level=self.log_level,
            step_log=str(self.step_log) if self.step_log else "",
        )


def parse_cores(text: str) -> tuple[int, ...]:
    """ "0,1" as numbers. Raises ValueError."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"must be core numbers with commas between them, got {text!r}") from None


def available_cores() -> set[int]:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))
