"""The typer app: one file a command, joined here."""

from __future__ import annotations

from typing import Annotated

import typer

from pdserve.cli import advise, config, demo, explain, generate, models, probe, serve, simulate, status, top, trace

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
app.command("simulate")(simulate.simulate)
app.command("advise")(advise.advise)
app.command("demo")(demo.demo)
app.add_typer(config.app, name="config")
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


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Serve large language models with prefill and decode on separate workers."""
