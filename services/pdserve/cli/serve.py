"""`pdserve serve`: a whole suite on this machine."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pdserve.cli.console import fetch_progress, run, start_progress
from pdserve.cli.reach import own_api_key
from pdserve.core.errors import ConfigError, PdserveError
from pdserve.rpc.access import access_of

if TYPE_CHECKING:
    from pdserve.cli.serve_settings import ServeSettings
    from pdserve.launch import ModelPart, Suite, SuitePlan

_ASK_SECONDS = 1.0  # a router that has no time to say what runs is not waited for
SETTINGS_CONTEXT = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""For typer: ServeSettings read the command line, so that it is one with environment and file."""


def serve(context: typer.Context) -> None:
    """Run a suite on this machine until Ctrl-C. `pdserve serve --help` shows its settings."""
    from pdserve.cli.serve_settings import ServeSettings
    from pdserve.rpc.settings_sources import variable

    settings = ServeSettings.load(with_model_named(context.args), program="pdserve serve")
    log_dir = settings.log_dir
    if log_dir is None and sys.stderr.isatty():
        log_dir = Path(tempfile.mkdtemp(prefix="pdserve-logs-"))
    # What was said to this command in variables goes to its services as flags; they must not take it for their own.
    for name in ServeSettings.model_fields:
        os.environ.pop(variable(name), None)

    async def main() -> None:
        await _serve(await _plan(settings), log_dir, settings.internal_secret_file)

    try:
        run(main(), interrupted=0)
    except typer.Exit as end:
        if end.exit_code == 0:
            typer.echo("stopped", err=True)
        raise


def with_model_named(arguments: Sequence[str]) -> list[str]:
    """`pdserve serve MODEL ...` means `--model MODEL`, as elsewhere."""
    if arguments and not arguments[0].startswith("-"):
        return ["--model", *arguments]
    return list(arguments)


async def _plan(settings: ServeSettings) -> SuitePlan:
    """Fetch the models and divide this machine. Raises ConfigError, ModelError."""
    from pdserve.launch import Machine, WorkerOptions, plan_suite

    access_of(
        settings.internal_secret_file, settings.tls.caller if settings.tls else None
    )  # what is wrong with it is better told before anything is started
    require_free(settings.host, settings.port)
    for offset in range(settings.gateways if settings.http_port else 0):
        require_free(settings.host, settings.http_port + offset, "--http-port")
    options = {field.name: getattr(settings, field.name) for field in dataclasses.fields(WorkerOptions)}
    return plan_suite(
        await resolve_parts(settings.model, settings.counts, settings.revision),
        Machine.here(),
        WorkerOptions(**options),
        prefix_caches=settings.prefix_cache,
        prefix_cache_capacity=settings.prefix_cache_capacity,
        gateways=settings.gateways,
        host=settings.host,
        port=settings.port,
        http_port=settings.http_port,
        metrics_port=settings.metrics_port,
        tls=settings.tls,
        per_worker={
            "router": {
                "api-keys-file": settings.api_keys_file,
                "slo-ttft-ms": settings.slo_ttft_ms,
                "slo-itl-ms": settings.slo_itl_ms,
            }
        },
    )


def require_free(host: str, port: int, option: str = "--port") -> None:
    """Raise ConfigError for an address that cannot be listened on, before anything is started for it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; try another {option}") from error


async def _serve(plan: SuitePlan, log_dir: Path | None, secret: Path | None) -> None:
    """Run the plan until it fails or this task is cancelled."""
    from pdserve.launch import Suite

    for note in plan.notes:
        typer.echo(note, err=True)
    if log_dir:
        typer.echo(f"logs in {log_dir}", err=True)
    async with AsyncExitStack() as stack:
        with start_progress() as listener:
            suite = await stack.enter_async_context(
                Suite(plan, log_folder=log_dir, listener=listener, internal_secret_file=secret)
            )
        typer.echo(f"ready at {suite.endpoint}")
        typer.echo(f"try: pdserve generate 'Hello' --chat --target {suite.endpoint}", err=True)
        scheme = "https" if plan.tls else "http"
        for gateway in suite.gateways:
            url = f"{scheme}://{gateway.endpoint}"
            typer.echo(f"OpenAI API at {url}/v1, web page at {url}", err=True)
        typer.echo(f"for pdserve probe: --internal-secret-file {suite.internal_secret_file}", err=True)
        for name, url in suite.metrics.items():
            typer.echo(f"metrics of {name} at {url}", err=True)
        try:
            raise await suite.wait_failed()
        except asyncio.CancelledError:
            await _say_draining(suite)
            raise


async def _say_draining(suite: Suite) -> None:
    """What a stop waits for. Told again to stop meanwhile, it waits for nothing."""
    from pdserve.client import NO_RETRIES, Client

    try:
        async with Client(suite.endpoint, retry=NO_RETRIES, api_key=own_api_key(), tls=suite.access.tls) as client:
            running = sum(model.running for model in (await client.stats(_ASK_SECONDS)).models)
        typer.echo(draining(running), err=True)
    except PdserveError:
        typer.echo(draining(None), err=True)
    except asyncio.CancelledError:
        suite.kill()
        raise


def draining(running: int | None) -> str:
    """A line for people; `running` requests, None: nobody knows."""
    if running == 0:
        return "stopping: no request runs"
    if running is None:
        return "draining; Ctrl-C again ends all now"
    what = "1 request still runs" if running == 1 else f"{running} requests still run"
    return f"draining: {what}; Ctrl-C again ends {'it' if running == 1 else 'them'} now"


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
