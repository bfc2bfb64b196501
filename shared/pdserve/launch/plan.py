"""Which processes make up a suite, and what each may use. A pure function: no files, clocks or processes in here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, repeat
from pathlib import Path

from pdserve.core.errors import ConfigError
from pdserve.launch.machine import Machine
from pdserve.rpc.tls import Tls

GIB = 1 << 30
MAX_PORT = 65535
KV_MEMORY_SHARE = (
    0.5  # of what the machine has left beside weights; the rest is activations, buffers and everybody else
)
KV_MEMORY_MAX = 2 * GIB  # for each worker, unless more is asked for or two longest sequences need more
CACHE_CAPACITY_MAX = 2 * GIB
GPU_MEMORY_UTILIZATION = 0.9
DRAIN_SECONDS = 8.0  # for running answers once a suite is told to stop; below the grace before it is killed
_PASSED_ON = (
    *("dtype", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "lookahead_tokens"),
    *("attention_backend", "kv_transport", "kv_transfer_dtype", "tensor_parallel_size", "enable_prefix_caching"),
    *("otlp_endpoint", "log_level"),
)


@dataclass(frozen=True, slots=True)
class ModelPart:
    """The workers of one model: prefill and decode apart, or `colocated` ones that do both.

    `path` is the model's folder, `name` what clients call it, `weight_bytes` what one copy of the weights takes,
    `token_bytes` the KV of one token and `max_model_len` the longest sequence, as far as they are known.
    """

    path: Path
    name: str
    prefill: int = 0
    decode: int = 0
    colocated: int = 0
    weight_bytes: int = 0
    token_bytes: int = 0
    max_model_len: int = 0

    def check(self) -> None:
        """Raise ConfigError for counts that contradict each other."""
        counts = {"prefill": self.prefill, "decode": self.decode, "colocated": self.colocated}
        for name, wanted in counts.items():
            if wanted < 0:
                raise ConfigError(f"{self.name}: {name} must be 0 or more, got {wanted}")
        if self.colocated and (self.prefill or self.decode):
            raise ConfigError(
                f"{self.name}: colocated workers prefill for themselves; don't ask for prefill or decode too"
            )
        if not any(counts.values()):
            raise ConfigError(f"{self.name}: no workers; ask for prefill and decode ones, or for colocated ones")
        if self.prefill and not self.decode:
            raise ConfigError(f"{self.name}: prefill workers need at least one decode worker to send KV to")
        if self.decode and not self.prefill:
            raise ConfigError(f"{self.name}: decode workers without prefill workers; say colocated if that is meant")


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Settings that every worker shares. None: the worker's own default, or this plan's share of the machine.

    `threads` is for each worker; `kv_cache_memory` is bytes for each worker.
    """

    dtype: str | None = None
    device: str = "auto"
    threads: int | None = None
    block_size: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    lookahead_tokens: int | None = None
    attention_backend: str | None = None
    kv_transport: str | None = None
    kv_transfer_dtype: str | None = None
    tensor_parallel_size: int | None = None
    enable_prefix_caching: bool | None = None
    otlp_endpoint: str | None = None
    log_level: str | None = None


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """TLS for a whole suite: one certificate for all its services, whose authority is among those of `ca_file`. Where
    `client_ca_file` is set, clients and the services themselves must have one of an authority in there."""

    cert_file: Path
    key_file: Path
    ca_file: Path
    client_ca_file: Path | None = None

    def flags(self, *, calls: bool) -> dict[str, object]:
        """A service's; `calls`: it calls others."""
        served = {"tls-cert-file": self.cert_file, "tls-key-file": self.key_file}
        return {**served, "tls-client-ca-file": self.client_ca_file, **({"tls-ca-file": self.ca_file} if calls else {})}

    @property
    def caller(self) -> Tls:
        """What the suite's own callers use."""
        return Tls(self.ca_file, self.cert_file, self.key_file)


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """One process: `python -m pdserve.<module> *arguments`, plus the endpoints that are known only once others run.

    `cache` is the position, among the suite's prefix caches, of the one that this worker uses.
    """

    module: str
    name: str
    arguments: tuple[str, ...]
    cache: int | None = None


@dataclass(frozen=True, slots=True)
class SuitePlan:
    """Everything that one suite starts, and, in `notes`, how the machine was divided, for people."""

    caches: tuple[ServicePlan, ...]
    workers: tuple[ServicePlan, ...]
    router: ServicePlan
    gateways: tuple[ServicePlan, ...] = ()
    notes: tuple[str, ...] = ()
    tls: TlsFiles | None = None


@dataclass(frozen=True, slots=True)
class _Slot:
    name: str
    module: str
    part: ModelPart


def plan_suite(
    parts: Sequence[ModelPart],
    machine: Machine,
    options: WorkerOptions = WorkerOptions(),
    *,
    prefix_caches: int = 0,
    prefix_cache_capacity: int | None = None,
    gateways: int = 0,
    host: str = "127.0.0.1",
    port: int = 0,
    http_port: int = 0,
    metrics_port: int | None = None,
    per_worker: Mapping[str, Mapping[str, object]] | None = None,
    tls: TlsFiles | None = None,
) -> SuitePlan:
    """Divide `machine` among the workers of `parts`. Raises ConfigError.

    Workers are named by role and number ("prefill-0"), with the model's name in front where there are several.
    `per_worker` overrides a worker's flags by its name: {"decode-0": {"kv-cache-memory": 1 << 20}}, and those of
    "router", "gateway-0" and "prefix-cache-0". Each worker gets its own cores while they last; memory for KV is divided
    evenly. Workers listen on loopback; `host` and `port` are the router's, and `host` the gateways' too: they take
    `http_port` and the ports that follow it, or any free ones (0).
    Metrics are exported where `metrics_port` says: the router's there, the workers' and caches' at the ports that
    follow it, or at any free ones (0). `prefix_cache_capacity` is in bytes, for each cache.
    `tls` None: none.
    """
    slots = _slots(parts)
    for what, number in (("prefix caches", prefix_caches), ("gateways", gateways)):
        if number < 0:
            raise ConfigError(f"{what} must be 0 or more, got {number}")
    last = (metrics_port or 0) + len(slots) + prefix_caches
    if last > MAX_PORT:
        raise ConfigError(f"the services' metrics do not fit between port {metrics_port} and {MAX_PORT}")
    metrics = count(metrics_port) if metrics_port else repeat(metrics_port)
    router_metrics = next(metrics)
    overrides = per_worker or {}
    known = [*(slot.name for slot in slots), "router", *(f"gateway-{index}" for index in range(gateways))]
    known += [f"prefix-cache-{index}" for index in range(prefix_caches)]
    unknown = set(overrides) - set(known)
    if unknown:
        raise ConfigError(f"flags for unknown workers {sorted(unknown)}; there are {known}")
    devices = _devices(len(slots), machine, options.device)
    share, kv_memory = _memory(slots, machine, options, prefix_caches, on_gpu=devices[0].startswith("cuda"))
    cores = divide_cores([slot.module for slot in slots], machine.cores)
    sharers = Counter(devices)
    calling, answering = (tls.flags(calls=True), tls.flags(calls=False)) if tls else ({}, {})
    workers, notes = [], []
    for index, slot in enumerate(slots):
        mine, device = cores[index], devices[index]
        threads = options.threads or len(mine)
        if threads > len(machine.cores):
            raise ConfigError(f"{threads} threads for {slot.name}; this process may use {len(machine.cores)} cores")
        pinned = threads <= len(mine)  # more threads than its own cores: pinned, they would only fight over those
        utilization = None
        if kv_memory is None:
            utilization = round((options.gpu_memory_utilization or GPU_MEMORY_UTILIZATION) / sharers[device], 4)
        flags: dict[str, object] = {
            "model": slot.part.path,
            "served-model-name": slot.part.name,
            "worker-id": slot.name,
            "device": device,
            "threads": threads,
            "cores": ",".join(map(str, mine)) if pinned else None,
            "kv-cache-memory": kv_memory,
            "gpu-memory-utilization": utilization,
            **{name.replace("_", "-"): getattr(options, name) for name in _PASSED_ON},
            "drain-seconds": DRAIN_SECONDS,
            "host": "127.0.0.1",
            "port": 0,
            "metrics-port": next(metrics),
            **calling,
            **overrides.get(slot.name, {}),
        }
        cache = index % prefix_caches if prefix_caches else None
        workers.append(ServicePlan(slot.module, slot.name, _arguments(flags), cache))
        notes.append(
            f"{slot.name}: {slot.part.name} on {device}, {threads} thread{'s' * (threads > 1)}, "
            + (f"cores {flags['cores']}" if flags["cores"] else "any core")
            + (f", {kv_memory / GIB:.2f} GiB of KV cache" if kv_memory is not None else "")
        )
    common = {"drain-seconds": DRAIN_SECONDS, "otlp-endpoint": options.otlp_endpoint, "log-level": options.log_level}
    capacity = prefix_cache_capacity or min(share, CACHE_CAPACITY_MAX)
    caches = []
    for index in range(prefix_caches):
        name = f"prefix-cache-{index}"
        cache_flags = {"capacity": capacity, "worker-id": name, "host": "127.0.0.1", "port": 0, **common, **answering}
        cache_flags |= {"metrics-port": next(metrics), **overrides.get(name, {})}
        caches.append(ServicePlan("prefix_cache", name, _arguments(cache_flags)))
    models = tuple(flag for part in parts for flag in ("--model", f"{part.name}={part.path}"))
    router_flags = {
        "host": host,
        "port": port,
        "metrics-port": router_metrics,
        **common,
        **calling,
        **overrides.get("router", {}),
    }
    router = ServicePlan("router", "router", (*models, *_arguments(router_flags)))
    doors = []
    for index in range(gateways):
        name = f"gateway-{index}"
        door_flags = {
            "host": host,
            "port": http_port + index if http_port else 0,
            **common,
            **calling,
            **overrides.get(name, {}),
        }
        doors.append(ServicePlan("gateway", name, _arguments(door_flags)))
    return SuitePlan(tuple(caches), tuple(workers), router, tuple(doors), tuple(notes), tls)


def divide_cores(modules: Sequence[str], cores: Sequence[int]) -> list[tuple[int, ...]]:
    """Cores for each worker, in order. What is left over goes to prefill workers first: their work is arithmetic.

    With fewer cores than workers each gets one, in turn, so that some share.
    """
    if len(cores) < len(modules):
        return [(cores[index % len(cores)],) for index in range(len(modules))]
    each, rest = divmod(len(cores), len(modules))
    by_need = sorted(range(len(modules)), key=lambda index: (modules[index] != "prefill", index))
    counts = [each] * len(modules)
    for index in by_need[:rest]:
        counts[index] += 1
    ends = list(accumulate(counts))
    return [tuple(cores[end - count : end]) for end, count in zip(ends, counts, strict=True)]


def _slots(parts: Sequence[ModelPart]) -> list[_Slot]:
    """Every worker there will be, checked."""
    if not parts:
        raise ConfigError("a suite needs a model")
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise ConfigError(f"model names must differ: {names}")
    slots = []
    for number, part in enumerate(parts):
        part.check()
        prefix = f"m{number}-" if len(parts) > 1 else ""
        slots += [_Slot(f"{prefix}prefill-{i}", "prefill", part) for i in range(part.prefill)]
        slots += [_Slot(f"{prefix}decode-{i}", "decode", part) for i in range(part.decode + part.colocated)]
    return slots


def _devices(count: int, machine: Machine, wanted: str) -> list[str]:
    """A device for each worker: GPUs in turn where any is meant, else what was said."""
    if wanted == "cuda" and not machine.gpus:
        raise ConfigError("device cuda, and there is no NVIDIA GPU that this process may use")
    if wanted in ("auto", "cuda") and machine.gpus:
        return [f"cuda:{machine.gpus[index % len(machine.gpus)]}" for index in range(count)]
    return ["cpu" if wanted == "auto" else wanted] * count


def _memory(
    slots: Sequence[_Slot], machine: Machine, options: WorkerOptions, caches: int, *, on_gpu: bool
) -> tuple[int, int | None]:
    """Bytes that each process may keep KV in, and each worker's KV memory (None: a share of its GPU, by itself)."""
    left = machine.memory - (0 if on_gpu else sum(slot.part.weight_bytes for slot in slots))
    share = max(0, int(left * KV_MEMORY_SHARE)) // (len(slots) + caches)
    if on_gpu:
        return share, options.kv_cache_memory
    longest = max(slot.part.token_bytes * (options.max_model_len or slot.part.max_model_len) for slot in slots)
    kv_memory = options.kv_cache_memory or min(share, max(KV_MEMORY_MAX, 2 * longest))
    if kv_memory <= 0 or kv_memory * len(slots) > left:
        raise ConfigError(
            f"{len(slots)} workers do not fit: {left / GIB:.2f} GiB of memory are left beside the weights, and each "
            f"wants {kv_memory / GIB:.2f} GiB of KV cache; lower kv-cache-memory or the number of workers"
        )
    return share, kv_memory


def _arguments(flags: Mapping[str, object]) -> tuple[str, ...]:
    """Flags as words; those that are None are left out, and yes or no is a word of its own."""
    words: list[str] = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            words += [f"--{name}", str(value)]
    return tuple(words)
