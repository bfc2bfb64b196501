"""CPU time of local processes, from Linux' /proc."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from pdserve.core.errors import ConfigError

_PROC = Path("/proc")


def cpu_seconds(pids: Iterable[int]) -> float:
    """What processes and all that they started have used, in user and kernel, in seconds. What ended is in it where the
    process that started it has waited for it. Raises ConfigError for a process that is not there."""
    children, used = defaultdict[int, list[int]](list), dict[int, float]()
    for folder in _PROC.iterdir():
        if folder.name.isdecimal() and (found := _stat(folder)):
            parent, used[int(folder.name)] = found
            children[parent].append(int(folder.name))
    waiting, counted = list(pids), set[int]()
    for pid in waiting:
        if pid not in used:
            raise ConfigError(f"--pid {pid}: there is no such process")
    while waiting:
        pid = waiting.pop()
        if pid not in counted:
            counted.add(pid)
            waiting += children[pid]
    return sum(used[pid] for pid in counted)


def _stat(folder: Path) -> tuple[int, float] | None:
    """Parent and seconds of a process, as proc(5) has them; None for one that has just ended."""
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    own_and_waited_for = sum(map(int, fields[11:15]))
    return int(fields[1]), own_and_waited_for / os.sysconf("SC_CLK_TCK")
