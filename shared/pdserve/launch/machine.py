"""What this machine has to divide: cores, memory, GPUs."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores that this process may use, bytes of memory that are available now, and NVIDIA GPU indices."""

    cores: tuple[int, ...]
    memory: int
    gpus: tuple[int, ...] = ()

    @classmethod
    def here(cls) -> Machine:
        """This machine as the operating system describes it. Imports no torch and starts no driver."""
        return cls(tuple(sorted(os.sched_getaffinity(0))), _available_memory(), _gpus())


def _available_memory() -> int:
    """Bytes that can be taken now: what the kernel says is available, and no more than the container's limit leaves."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit, used = _CGROUP_LIMIT.read_text().strip(), _CGROUP_USED.read_text().strip()
    except OSError:
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - int(used)))


def _gpus() -> tuple[int, ...]:
    """Indices as CUDA will count them in a child process, so after CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(range(len([part for part in visible.split(",") if part.strip() not in ("", "-1")])))
    try:
        names = os.listdir("/dev")
    except OSError:
        return ()
    return tuple(range(sum(1 for name in names if re.fullmatch(r"nvidia\d+", name))))
