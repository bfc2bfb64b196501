"""`pdserve serve`: a whole suite on this machine."""

from __future__ import annotations

import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.console import fail, fetch_progress, parse_size, run, start_progress
from pdserve.core.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.launch import ModelPart, SuitePlan

DEFAULT_PORT = 50051


def serve(
    model: Annotated[
        list[str],
        typer.Option(help="Folder, hub id or smollm2-135m-instruct; NAME=MODEL to serve it as NAME. Repeat for more."),
    ],
    prefill: Annotated[
        list[int], typer.Option(min=0, help="Prefill workers. Once for all models, or once for each.")
    ] = [],  # noqa: B006  nobody changes it
    decode: Annotated[
        list[int], typer.Option(min=0, help="Decode workers. Once for all models, or once for each.")
    ] = [],  # noqa: B006
    colocated: Annotated[
        list[int], typer.Option(min=0, help="Workers that do both, instead of prefill and decode ones.")
    ] = [],  # noqa: B006
    prefix_cache: Annotated[int, typer.Option(min=0, help="Prefix-cache services, shared by all workers.")] = 0,
    prefix_cache_capacity: Annotated[str | None, typer.Option(help="Memory of each prefix cache, as 2GiB.")] = None,
    host: Annotated[str, typer.Option(help="Address that the router listens on; loopback unless you say so.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="The router's port; 0 takes a free one.")] = DEFAULT_PORT,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit for hub ids.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each worker; default: its share.")] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens in a KV block.")] = None,
    kv_cache_memory: Annotated[str | None, typer.Option(help="KV cache of each worker, as 4GiB.")] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(min=0.01, max=1.0, help="Share of a GPU's memory to use in all.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest prompt plus answer, in tokens.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences that one worker runs at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens in one engine step.")] = None,
    lookahead_tokens: Annotated[int | None, typer.Option(min=1, help="Reserved beyond the prompt.")] = None,
    attention_backend: Annotated[str | None, typer.Option(help="auto, torch or flash.")] = None,
    kv_transport: Annotated[str | None, typer.Option(help="auto, nccl, cuda-ipc or gloo.")] = None,
    kv_transfer_dtype: Annotated[
        str | None, typer.Option(help="How KV travels: auto (as it is), or in one byte a number, int8 or fp8.")
    ] = None,
    tensor_parallel_size: Annotated[int | None, typer.Option(min=1, help="Only 1 works so far.")] = None,
    otlp_endpoint: Annotated[str | None, typer.Option(help="Where traces go, as host:port.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Folder for the services' logs; default: a new one on a terminal, else stderr.")
    ] = None,
) -> None:
    """Run a suite on this machine until Ctrl-C. If any part of it dies, all of it stops and the command fails.

    Each option can also come from the environment: PDSERVE_MODEL, PDSERVE_PORT and so on.
    """
    from pdserve.launch import WorkerOptions

    options = WorkerOptions(
        dtype=dtype,
        device=device,
        threads=threads,
        block_size=block_size,
        kv_cache_memory=parse_size(kv_cache_memory),
        gpu_memory_utilization=gpu_memory_utilization,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        lookahead_tokens=lookahead_tokens,
        attention_backend=attention_backend,
        kv_transport=kv_transport,
        kv_transfer_dtype=kv_transfer_dtype,
        tensor_parallel_size=tensor_parallel_size,
        otlp_endpoint=otlp_endpoint,
        log_level=log_level,
    )
    try:
        counts = model_counts(len(model), prefill, decode, colocated)
    except ConfigError as error:
        fail(str(error), code=2)
    if log_dir is None and sys.stderr.isatty():
        log_dir = Path(tempfile.mkdtemp(prefix="pdserve-logs-"))
    capacity = parse_size(prefix_cache_capacity)

    async def main() -> None:
        from pdserve.launch import Machine, plan_suite

        require_free(host, port)
        parts = await resolve_parts(model, counts, revision)
        plan = plan_suite(
            parts,
            Machine.here(),
            options,
            prefix_caches=prefix_cache,
            prefix_cache_capacity=capacity,
            host=host,
            port=port,
        )
        await _serve(plan, log_dir)

    try:
        run(main(), interrupted=0)
    except typer.Exit as end:
        if end.exit_code == 0:
            typer.echo("stopped", err=True)
        raise


def require_free(host: str, port: int) -> None:
    """Raise ConfigError for an address that cannot be listened on, before anything is started for it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; try another --port") from error


async def _serve(plan: SuitePlan, log_dir: Path | None) -> None:
    """Run the plan until it fails or this task is cancelled."""
    from pdserve.launch import Suite

    for note in plan.notes:
        typer.echo(note, err=True)
    if log_dir:
        typer.echo(f"logs in {log_dir}", err=True)
    async with AsyncExitStack() as stack:
        with start_progress() as listener:
            suite = await stack.enter_async_context(Suite(plan, log_folder=log_dir, listener=listener))
        typer.echo(f"ready at {suite.endpoint}")
        typer.echo(f"try: pdserve generate 'Hello' --chat --target {suite.endpoint}", err=True)
        raise await suite.wait_failed()


def model_counts(
    models: int, prefill: Sequence[int], decode: Sequence[int], colocated: Sequence[int]
) -> list[tuple[int, int, int]]:
    """(prefill, decode, colocated) for each model. Nothing asked for: one prefill and one decode worker each.

    Raises ConfigError when an option is given neither once nor once for each model, or contradicts another.
    """
    columns = []
    for name, given in (("prefill", prefill), ("decode", decode), ("colocated", colocated)):
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


async def resolve_parts(
    models: Sequence[str], counts: Sequence[tuple[int, int, int]], revision: str | None = None
) -> list[ModelPart]:
    """Fetch what must be fetched, and say what each model is called: NAME=MODEL, a folder's own name, or its id."""
    from pdserve.launch.models import local_folder, model_part, resolve_model

    parts = []
    for text, (prefill, decode, colocated) in zip(models, counts, strict=True):
        name, _, source = text.rpartition("=")
        with fetch_progress(source) as progress:
            folder = await resolve_model(source, revision=revision, progress=progress)
        own_name = folder.name if local_folder(source) else source
        parts.append(model_part(folder, name or own_name, prefill, decode, colocated))
    return parts
