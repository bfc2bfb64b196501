"""Descriptors are raised as far as they may, and what is left for clients is said."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import resource
from pdserve.rpc.descriptors import RESERVE, room_for

limits = lambda: resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (280, 400))
assert room_for(10) == 10 and limits() == (280, 400), "there is room already"
assert room_for(100) == 100 and limits() == (100 + RESERVE, 400), "no more than is needed"
assert room_for(1000) == 400 - RESERVE and limits() == (400, 400)
"""


def test_the_soft_limit_is_raised_to_what_is_needed_and_a_lower_room_is_told() -> None:
    """In a process of its own: a hard limit that was lowered does not come back."""
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert (ran.stdout + ran.stderr).count("few_descriptors") == 1
