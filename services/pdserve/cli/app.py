"""The typer app: one file a command, joined here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pdserve.cli import (
    advise,
    bench,
    config,
    demo,
    explain,
    generate,
    keys,
    models,
    probe,
    reach,
    serve,
    simulate,
    status,
    top,
    trace,
)
from pdserve.rpc.tls import Tls

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback here is a bug; show it as it is
    rich_markup_mode=None,
    help="Serve large language models with prefill and decode on separate workers.",
)
app.command("serve", context_settings=serve.SETTINGS_CONTEXT)(serve.serve)
app.command("generate")(generate.generate)
app.command("status")(status.status)
app.command("top")(top.top)
app.command("trace")(trace.trace)
app.command("explain")(explain.explain)
app.command("bench")(bench.bench)
app.command("simulate")(simulate.simulate)
app.command("advise")(advise.advise)
app.command("demo")(demo.demo)
app.add_typer(config.app, name="config")
app.add_typer(keys.app, name="keys")
app.add_typer(models.app, name="models")
app.add_typer(probe.app, name="probe")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(version("pdserve"))
        except PackageNotFoundError:
            typer.echo("not installed (run from a source tree)")
        raise typer.Exit


def _pem(name: str, text: str) -> Any:
    return typer.Option(f"--tls-{name}-file", envvar=f"PDSERVE_TLS_{name.upper()}_FILE", show_envvar=True, help=text)


@app.callback()
def _options(
    tls_ca_file: Annotated[Path | None, _pem("ca", "Authorities, in PEM: call routers and workers with TLS.")] = None,
    tls_cert_file: Annotated[Path | None, _pem("cert", "Own certificate, for those that ask for one.")] = None,
    tls_key_file: Annotated[Path | None, _pem("key", "Its key.")] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Serve large language models with prefill and decode on separate workers."""
    reach.TLS.set(Tls(tls_ca_file, tls_cert_file, tls_key_file) if tls_ca_file else None)
