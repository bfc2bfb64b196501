"""Generate shared/pdserve/v1 from protos/. `--check` compares instead of writing, and fails on any difference."""

from __future__ import annotations

import argparse
import filecmp
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
TARGET = ROOT / "shared"
PACKAGE = Path("pdserve/v1")


def generate(target: Path) -> None:
    """Write the stubs, their type stubs and the marker that they have types below `target`."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    outputs = [f"--{kind}_out={target}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    bin_dir = Path(sys.executable).parent  # where the mypy plugins are, activated venv or not
    env = {**os.environ, "PATH": f"{bin_dir}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *outputs, *sources]
    subprocess.run(command, check=True, env=env)
    (target / PACKAGE / "__init__.py").write_text(
        '"""Generated from protos/pdserve/v1 by `make proto`; do not edit."""\n'
    )
    (target / PACKAGE / "py.typed").touch()


def drift() -> list[str]:
    """Names of committed files that differ from what the protos generate."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh, committed = Path(folder) / PACKAGE, TARGET / PACKAGE
        names = {path.name for path in (*fresh.iterdir(), *committed.iterdir()) if path.is_file()}
        _, different, missing = filecmp.cmpfiles(fresh, committed, sorted(names), shallow=False)
        return [*different, *missing]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        generate(TARGET)
        return 0
    names = drift()
    if names:
        print("out of date, run `make proto`:", *names, sep="\n  ")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
