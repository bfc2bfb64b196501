"""CPU time of processes is the kernel's, children included."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pdserve.bench.cpu import cpu_seconds
from pdserve.core.errors import ConfigError

TICK = 1 / os.sysconf("SC_CLK_TCK")
BURN = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"


def test_a_process_and_its_children() -> None:
    """A child counts while it runs and, waited for, when it has ended."""
    before = cpu_seconds([os.getpid()])
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        running = cpu_seconds([os.getpid()])
        assert running - before >= 0.2 - 2 * TICK
        assert cpu_seconds([child.pid]) >= 0.2 - 2 * TICK
        assert cpu_seconds([os.getpid(), child.pid]) - running < 0.2  # counted once
        child.communicate(b"\n")
    assert cpu_seconds([os.getpid()]) - before >= 0.2 - 2 * TICK


def test_nobody() -> None:
    with pytest.raises(ConfigError, match="no such process"):
        cpu_seconds([2**22 + 1])
