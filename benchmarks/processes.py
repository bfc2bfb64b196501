"""What a suite's processes use, as the kernel counts it (Linux)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.launch import Suite


def cpu_seconds(pid: int) -> float:
    """What a process has used so far, in user and kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """What of a process is in memory now, with what it shares."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def children(pid: int) -> list[int]:
    """What a process has started, and has not seen the end of."""
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _words(task / "children")]


def processes(suite: Suite) -> dict[str, int]:
    """The process ids of a suite by name; a worker's engine has its front's name with "-engine" behind it."""
    found = {}
    for service in suite.services:
        found[service.name] = service.pid
        for number, child in enumerate(children(service.pid)):
            found[f"{service.name}-engine{number or ''}"] = child
    return found


def _words(path: Path) -> list[str]:
    return path.read_text().split()
