"""Every `make` target and every `pdserve` command and option in README.md's code blocks exists."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import typer.main

from pdserve.cli.app import app

ROOT = Path(__file__).resolve().parent.parent


def shell_lines(text: str) -> list[str]:
    """Command lines of the fenced sh blocks, continuations joined, comments left out."""
    blocks = re.findall(r"```(?:sh|bash|console)\n(.*?)```", text, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split(" #")[0].removeprefix("$ ").strip() for line in lines if line.strip() and line[0] != "#"]


def check_make(words: list[str], targets: set[str]) -> list[str]:
    named = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
    return [f"make has no target {name}" for name in named if name not in targets]


def check_command(words: list[str], root: Any) -> list[str]:
    """Follow the words down to a command, then look up each option there."""
    command, rest = root, words[1:]
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return [f"pdserve has no command {rest[0]}"]
        command, rest = command.commands[rest[0]], rest[1:]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    options = [word.split("=")[0] for word in rest if word.startswith("--")]
    return [f"{command.name} has no option {option}" for option in options if option not in known | {"--help"}]


def main() -> int:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    root = typer.main.get_command(app)
    problems = []
    for line in shell_lines((ROOT / "README.md").read_text()):
        words = [word for word in shlex.split(line) if not re.match(r"^[A-Z_]+=", word) or line.startswith("make")]
        if not words:
            continue
        name = words[0].rsplit("/", 1)[-1]
        found = (
            check_make(words, targets) if name == "make" else check_command(words, root) if name == "pdserve" else []
        )
        problems += [f"{line}: {problem}" for problem in found]
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
