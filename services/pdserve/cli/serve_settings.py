"""The settings of `pdserve serve`: how many of what, and what all workers share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field, PositiveInt

from pdserve.core.errors import ConfigError
from pdserve.launch.plan import TlsFiles
from pdserve.rpc.settings import OtlpEndpoint, Settings, tls_contradictions


class ServeSettings(Settings):
    """Run a suite on this machine until Ctrl-C. A first word that is no option is the model. If any part of the suite
    dies, all of it stops and the command fails.

    Settings come from the options below, then from PDSERVE_ variables, then from the file that --config names.
    """

    model: list[str] = Field(
        min_length=1, description="folder, hub id or smollm2-135m-instruct; NAME=MODEL to serve it as NAME"
    )
    prefill: list[int] = Field([], description="prefill workers, once for all models or once for each; default: 1")
    decode: list[int] = Field([], description="decode workers, once for all models or once for each; default: 1")
    colocated: list[int] = Field([], description="workers that do both, instead of prefill and decode ones")
    prefix_cache: int = Field(0, ge=0, description="prefix-cache services, shared by all workers")
    prefix_cache_capacity: ByteSize | None = Field(
        None, gt=0, description="memory of each prefix cache, such as 2GiB; default: a share of the machine's"
    )
    gateways: int = Field(1, ge=0, description="gateways, which speak OpenAI's HTTP")
    http_port: int = Field(
        8000, ge=0, le=65535, description="the first gateway's port, others follow it; 0: any free ones"
    )
    host: str = Field("127.0.0.1", description="address that the router and the gateways listen on")
    port: int = Field(50051, ge=0, le=65535, description="the router's port; 0: any free one")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port for the router's Prometheus metrics, the workers' follow it; 0: any free ones; unset: none",
    )
    revision: str | None = Field(None, description="branch, tag or commit for hub ids")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = Field(None, description="of weights and KV")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda|cuda:\d+)$", description="auto, cpu, cuda or cuda:N")
    threads: PositiveInt | None = Field(None, description="threads of each worker; default: its share of the cores")
    block_size: PositiveInt | None = Field(None, description="tokens in a KV block")
    kv_cache_memory: ByteSize | None = Field(None, gt=0, description="KV cache of each worker, such as 4GiB")
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1, description="share of a GPU's memory to use in all")
    slo_ttft_ms: float | None = Field(
        None, gt=0, description="milliseconds to the first token that requests are promised"
    )
    slo_itl_ms: float | None = Field(
        None, gt=0, description="milliseconds between tokens that requests are promised; prompts keep out of their way"
    )
    max_model_len: PositiveInt | None = Field(None, description="longest prompt plus answer, in tokens")
    max_num_seqs: PositiveInt | None = Field(None, description="sequences that one worker runs at once")
    max_num_batched_tokens: PositiveInt | None = Field(None, description="tokens in one engine step")
    lookahead_tokens: PositiveInt | None = Field(None, description="answer tokens that a reservation has room for")
    attention_backend: Literal["auto", "torch", "native", "flash"] | None = Field(None, description="attention kernels")
    kv_transport: Literal["auto", "nccl", "gloo", "cuda-ipc"] | None = Field(
        None, description="how KV moves between workers"
    )
    kv_transfer_dtype: Literal["auto", "int8", "fp8"] | None = Field(
        None, description="how KV travels: auto, as it is; int8 or fp8, in one byte a number"
    )
    tensor_parallel_size: PositiveInt | None = Field(None, description="GPUs per worker; only 1 is supported")
    enable_prefix_caching: bool = Field(True, description="reuse KV of equal prompt beginnings")
    otlp_endpoint: OtlpEndpoint | None = Field(None, description="OTLP gRPC endpoint for traces and metrics")
    log_level: Literal["debug", "info", "warning", "error"] | None = Field(None, description="least level logged")
    api_keys_file: Path | None = Field(
        None, description="YAML file with the digests of API keys; unset: whoever reaches the router may use it"
    )
    internal_secret_file: Path | None = Field(
        None,
        description="file with the secret that the services show one another; default: a new one, gone with the suite",
    )
    tls_cert_file: Path | None = Field(None, description="certificate of all the services, in PEM; with it, TLS alone")
    tls_key_file: Path | None = Field(None, description="private key of the certificate, in PEM")
    tls_ca_file: Path | None = Field(
        None, description="authorities, in PEM, by which the services know one another's certificate"
    )
    tls_client_ca_file: Path | None = Field(
        None, description="authorities, in PEM; only callers with a certificate of theirs are let in, services too"
    )
    log_dir: Path | None = Field(
        None, description="folder for the services' logs; default: a new one on a terminal, else stderr"
    )

    @property
    def counts(self) -> list[tuple[int, int, int]]:
        """(prefill, decode, colocated) for each model."""
        return model_counts(len(self.model), self.prefill, self.decode, self.colocated)

    @property
    def tls(self) -> TlsFiles | None:
        """What the services listen and call one another with; None: no TLS."""
        if self.tls_cert_file is None or self.tls_key_file is None or self.tls_ca_file is None:
            return None
        return TlsFiles(self.tls_cert_file, self.tls_key_file, self.tls_ca_file, self.tls_client_ca_file)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        try:
            _ = self.counts
        except ConfigError as error:
            yield str(error)
        if self.kv_cache_memory and self.gpu_memory_utilization:
            yield "kv-cache-memory and gpu-memory-utilization both say how much memory KV takes; leave one out"
        if self.prefix_cache and not self.enable_prefix_caching:
            yield f"prefix-cache {self.prefix_cache} is never asked with no-enable-prefix-caching"
        if self.prefix_cache_capacity and not self.prefix_cache:
            yield "prefix-cache-capacity is said, and prefix-cache is 0: there is none to have it"
        yield from tls_contradictions(self.tls_cert_file, self.tls_key_file, self.tls_client_ca_file)
        if (self.tls_cert_file is None) != (self.tls_ca_file is None):
            yield "tls-cert-file and tls-ca-file go together: the services call one another"
        last = self.http_port + self.gateways - 1
        if self.http_port and last > 65535:
            yield f"gateways {self.gateways} do not fit between http-port {self.http_port} and 65535"
        if self.http_port and self.http_port <= self.port <= last:
            yield f"port {self.port} is a gateway's too: they take http-port {self.http_port} to {last}"
        if self.revision and all(Path(text.rpartition("=")[2]).expanduser().is_dir() for text in self.model):
            yield f"revision {self.revision} is for hub ids, and model is a folder"


def model_counts(
    models: int, prefill: Sequence[int], decode: Sequence[int], colocated: Sequence[int]
) -> list[tuple[int, int, int]]:
    """(prefill, decode, colocated) for each model. Nothing asked for: one prefill and one decode worker each.

    Raises ConfigError when an option is given neither once nor once for each model, or contradicts another.
    """
    columns = []
    for name, given in (("prefill", prefill), ("decode", decode), ("colocated", colocated)):
        if any(count < 0 for count in given):
            raise ConfigError(f"--{name} must be 0 or more, got {min(given)}")
        if len(given) not in (0, 1, models):
            raise ConfigError(
                f"--{name} is given {len(given)} times for {models} models; say it once, or once for each"
            )
        columns.append(list(given) * models if len(given) == 1 else list(given) or [0] * models)
    if not (prefill or decode or colocated):
        columns[0] = columns[1] = [1] * models
    if len(prefill) <= 1 and len(colocated) <= 1 and any(columns[2]) and (any(columns[0]) or any(columns[1])):
        raise ConfigError("--colocated workers prefill for themselves: leave --prefill and --decode out")
    return list(zip(*columns, strict=True))
