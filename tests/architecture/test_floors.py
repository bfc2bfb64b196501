"""Files import only from their own floor or below; services never import one another (contracts in pyproject.toml)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_floors_hold() -> None:
    """import-linter, as `make check` runs it, finds no broken contract."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 broken" in result.stdout


def test_the_roots_have_no_package_file() -> None:
    """A `pdserve/__init__.py` in one root would hide the other root's half of the namespace."""
    assert [path for root in ("shared", "services") for path in (ROOT / root / "pdserve").glob("*.py*")
            if path.stem == "__init__"] == []  # fmt: skip


def test_the_command_line_loads_neither_torch_nor_grpc() -> None:
    """`pdserve --help` starts at once, because it imports nothing heavy."""
    code = "import sys, pdserve.cli.app; sys.exit(' '.join({'torch', 'grpc', 'rich.table'} & sys.modules.keys()) or 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
