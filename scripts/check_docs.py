"""What the pages for people name exists: make targets, commands with their options, files, pages and headings."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from pdserve.cli.app import app
from pdserve.rpc.settings import Settings
from pdserve.rpc.settings_sources import option
from scripts.config_reference import SERVICES
from scripts.doc_blocks import ROOT, SHELL, blocks, pages

# What each `python -m` runs with, and `pdserve serve`, whose options typer does not know.
MODULES: dict[str, type[Settings]] = {
    "pdserve.router": SERVICES["router"][1],
    "pdserve.prefill": SERVICES["prefill and decode"][1],
    "pdserve.decode": SERVICES["prefill and decode"][1],
    "pdserve.prefix_cache": SERVICES["prefix cache"][1],
    "pdserve.gateway": SERVICES["gateway"][1],
    "pdserve serve": SERVICES["serve"][1],
}
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", flags=re.MULTILINE)


def check_line(line: str, root: Any, targets: set[str]) -> list[str]:
    """What is wrong with one command line; nothing where it is a command of somebody else's."""
    words = [word for word in shlex.split(line) if not re.match(r"^[A-Z_]+=", word) or line.startswith("make")]
    if not words:
        return []
    match words[0].rsplit("/", 1)[-1], words[1:]:
        case "make", ["-C", folder, *rest]:
            makefile = ROOT / folder / "Makefile"
            if not makefile.is_file():
                return [f"there is no Makefile in {folder}"]
            return check_line(shlex.join(["make", *rest]), root, make_targets(makefile))
        case "make", rest:
            named = [word for word in rest if "=" not in word and not word.startswith("-")]
            return [f"make has no target {name}" for name in named if name not in targets]
        case "pdserve", ["serve", *rest]:
            return check_settings("pdserve serve", rest)
        case "pdserve", _:
            return check_command(words, root)
        case (("python" | "python3"), ["-m", module, *rest]) if module.startswith("pdserve."):
            return check_settings(module, rest)
        case (("python" | "python3"), [script, *_]) if script.endswith(".py"):
            return [] if (ROOT / script).is_file() else [f"there is no {script}"]
    return []


def make_targets(makefile: Path) -> set[str]:
    """What it can be asked for by name."""
    return set(re.findall(r"^([a-z0-9-]+):", makefile.read_text(encoding="utf-8"), flags=re.MULTILINE))


def check_settings(name: str, words: list[str]) -> list[str]:
    """Options of what is started with a settings model."""
    if name not in MODULES:
        return [] if name == "pdserve.rpc.healthcheck" else [f"there is no service {name}"]
    fields = MODULES[name].model_fields
    known = {option(field) for field in fields} | {f"--no{option(field)[1:]}" for field in fields} | {"--help"}
    return [f"{name} has no option {flag}" for flag in flags(words) if flag not in known]


def check_command(words: list[str], root: Any) -> list[str]:
    """Follow the words down to a command of typer's, then look up each option there."""
    command, rest = root, words[1:]
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return [f"pdserve has no command {rest[0]}"]
        command, rest = command.commands[rest[0]], rest[1:]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return [f"{command.name} has no option {flag}" for flag in flags(rest) if flag not in known | {"--help"}]


def flags(words: list[str]) -> list[str]:
    """The options among the words up to where the command ends."""
    ends = [index for index, word in enumerate(words) if word in ("|", ">", "&", "&&", ";", "--")]
    return [word.split("=")[0] for word in words[: min(ends, default=len(words))] if word.startswith("--")]


def check_links(page: Path, text: str) -> Iterator[str]:
    """Relative links lead to files, and to headings where they name one."""
    for target in _LINK.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"link to {target}: there is no such file"
        elif anchor and anchor not in set(map(slug, _HEADING.findall(file.read_text(encoding="utf-8")))):
            yield f"link to {target}: there is no such heading"


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def main() -> int:
    targets = make_targets(ROOT / "Makefile")
    root = typer.main.get_command(app)
    problems = []
    for page in pages():
        text, name = page.read_text(encoding="utf-8"), page.relative_to(ROOT)
        problems += [f"{name}: {problem}" for problem in check_links(page, text)]
        for block in blocks(text):
            for line in block.commands if block.language in SHELL else ():
                problems += [f"{name}:{block.line}: {line}: {problem}" for problem in check_line(line, root, targets)]
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
