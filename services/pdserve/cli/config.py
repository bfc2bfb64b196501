"""`pdserve config`: check settings before anything is started with them.

Each service reads its settings in a process of its own, as it would at its start, so that what is checked here is what
will be in force, and no service's code is imported into this one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from pdserve.cli.console import fail

app = typer.Typer(no_args_is_help=True, help="Check settings, and print those in force.")

SERVICES = {
    "router": ("pdserve.router",),
    "prefill": ("pdserve.prefill",),
    "decode": ("pdserve.decode",),
    "prefix-cache": ("pdserve.prefix_cache",),
    "gateway": ("pdserve.gateway",),
    "serve": ("pdserve.cli", "serve"),
}
"""What `python -m` runs for each."""
_WRONG = 2  # exit status of a service whose settings are wrong
Service = Annotated[str | None, typer.Option(help=f"{', '.join(SERVICES)}.")]


@app.command("check")
def check(
    files: Annotated[list[Path] | None, typer.Argument(help="YAML files; none: the environment alone.")] = None,
    service: Service = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a file, a line each.")] = False,
) -> None:
    """Check YAML files together with the environment, and print what is in force and where it was said.

    A file's name says which service it is for (router.yaml, decode-2.yaml), unless --service does. Ends with 2 where
    anything is wrong. Secrets are masked.
    """
    _known(service)
    for file in files or ():
        if not file.exists():
            fail(f"{file}: there is no such file", code=_WRONG)
    wanted: list[tuple[Path | None, str]] = [(file, _known(service) or _service_of(file)) for file in files or ()]
    if not files:
        wanted = [(None, _known(service) or fail("name a file, or a --service whose variables to check", code=_WRONG))]
    results = [_check(file, name, as_json) for file, name in wanted]
    if not all(results):
        raise typer.Exit(_WRONG)


@app.command("schema")
def schema(service: Annotated[str, typer.Option(help=f"{', '.join(SERVICES)}.")]) -> None:
    """Print the JSON schema of a service's YAML file, for editors."""
    result = _run(_known(service) or "", "schema")
    typer.echo(result.stdout, nl=False)


def _known(service: str | None) -> str | None:
    if service is not None and service not in SERVICES:
        raise typer.BadParameter(f"{service!r} is none of {', '.join(SERVICES)}", param_hint="--service")
    return service


def _service_of(file: Path) -> str:
    """The service that a file's name begins with."""
    name = file.name.replace("_", "-")
    found = [service for service in SERVICES if re.match(rf"{service}(?![a-z])", name)]
    if not found:
        fail(f"{file}: which service is it for? Say --service, or call it router.yaml and so on", code=_WRONG)
    return found[0]


def _check(file: Path | None, service: str, as_json: bool) -> bool:
    """Check one file, and say what came of it. True where all is well."""
    result = _run(service, "json" if as_json else "table", *(["--config", str(file)] if file else []))
    valid = result.returncode == 0
    problems = [line.removeprefix("error: ") for line in result.stderr.splitlines()]
    name = str(file) if file else "environment"
    if as_json:
        facts: dict[str, Any] = {"service": service, "file": str(file) if file else None, "valid": valid}
        typer.echo(json.dumps({**facts, "problems": problems, "settings": json.loads(result.stdout or "{}")}))
        return valid
    typer.echo(f"{name}: {'valid' if valid else 'wrong'} settings for {service}")
    typer.echo("".join(f"  {line}\n" for line in (result.stdout.splitlines() if valid else problems)))
    return valid


def _run(service: str, kind: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Ask the service itself. Its exit status is 0 or 2; anything else is a bug, shown as it is."""
    command = [sys.executable, "-m", *SERVICES[service], *arguments, "--check-config", kind]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if result.returncode not in (0, _WRONG):
        fail(f"{' '.join(command[1:])} ended with {result.returncode}:\n{result.stderr}")
    return result
