"""The committed stubs and the API reference are what the protos generate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("script", ["proto.py", "api_reference.py"])
def test_generated_files_match_the_protos(script: str) -> None:
    """`--check` finds no difference."""
    command = [sys.executable, f"scripts/{script}", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
