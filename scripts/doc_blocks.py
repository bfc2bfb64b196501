"""The fenced code blocks of a Markdown page, and the command lines in them.

A block's first word is its language. What follows says how a test runs it:

    ```sh                       run, and ends with 0
    ```sh background            stays running while the rest of the page runs
    ```sh no-run needs a GPU    is not run, with the reason
    ```python                   run as a script
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHELL = ("sh", "bash", "console")
_FENCE = re.compile(r"^```(\w+)[ \t]*([^\n]*)\n(.*?)^```[ \t]*$", flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """One block: `how` is "run", "background" or "no-run", `why` the reason for the last; `line` counts from 1."""

    language: str
    how: str
    why: str
    text: str
    line: int

    @property
    def commands(self) -> list[str]:
        """A shell block's commands, continuations and quoted line ends joined, comments left out."""
        found, begun = [], ""
        for line in self.text.replace("\\\n", " ").splitlines():
            begun += line if begun else re.split(r"(?:^|\s)#", line)[0].strip()
            try:
                shlex.split(begun)
            except ValueError:  # a quotation goes on in the next line
                begun += "\n"
                continue
            found.append(begun)
            begun = ""
        return [command for command in found if command]


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks that name a language, in order. Raises ValueError for a word that says nothing."""
    for match in _FENCE.finditer(text):
        language, words = match[1], match[2].split()
        how = words[0] if words else "run"
        why = " ".join(words[1:])
        line = text.count("\n", 0, match.start()) + 1
        if how not in ("run", "background", "no-run") or (how == "no-run") != bool(why):
            raise ValueError(f"line {line}: ```{language} {match[2]}: say background, or no-run and why")
        yield Block(language, how, why, match[3], line)


def pages() -> list[Path]:
    """What people read: the README, the pages of docs/, and the SDKs'."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "sdk" / "README.md"]
