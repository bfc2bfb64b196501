"""`pdserve keys`: API keys for the file that the router reads."""

from __future__ import annotations

from typing import Annotated

import typer

from pdserve.cli.console import fail
from pdserve.core.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="API keys, for the router's --api-keys-file.")


@app.callback()
def _keys() -> None:
    """API keys, for the router's --api-keys-file."""


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="What the key is called, in the file and in no request.")],
    models: Annotated[list[str], typer.Option(help="A model it is for. Repeat for more; default: all.")] = [],  # noqa: B006
    tenant: Annotated[str, typer.Option(help="Whom its requests are accounted to; default: the name.")] = "",
    max_requests: Annotated[int | None, typer.Option(min=1, help="Requests that may wait or run at a time.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Prompts and answers together.")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="It sees everybody's requests, and may name tenants.")] = False,
) -> None:
    """Make a key. Its entry for the file goes to stdout; the key itself is shown this once, on stderr."""
    from pdserve.rpc.api_keys import new_key

    limits = {"tenant": tenant, "max_requests": max_requests, "tokens_per_minute": tokens_per_minute, "admin": admin}
    try:
        key, entry = new_key(name, models, **limits)
    except ConfigError as error:
        fail(str(error), 2)
    typer.echo(entry, nl=False)
    typer.echo(f"the key, which nobody can show again: {key}", err=True)
