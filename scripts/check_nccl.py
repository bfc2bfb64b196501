"""The `gpu` extra must resolve to one NCCL: two wheels own the same libnccl.so.2, and the last one installed wins.

torch up to 2.10 is a CUDA 12 build and brings nvidia-nccl-cu12; from 2.11 on it is a CUDA 13 build with
nvidia-nccl-cu13. Asks pip what it would install, from metadata alone. flash-attn is left out: building it takes a
compiler and the CUDA toolkit, and it depends on no NCCL of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def gpu_requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [need for need in project["optional-dependencies"]["gpu"] if not need.startswith("flash-attn")]


def resolve(requirements: list[str]) -> list[str]:
    """Names and versions that pip would install on an empty Linux machine with a GPU."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    result = subprocess.run([*command, *requirements], capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"pip could not resolve {requirements}:\n{result.stderr}")
    return [
        f"{item['metadata']['name']}=={item['metadata']['version']}" for item in json.loads(result.stdout)["install"]
    ]


def main() -> int:
    packages = resolve(gpu_requirements())
    found = sorted(package for package in packages if package.startswith("nvidia-nccl"))
    print(f"gpu extra: {', '.join(p for p in packages if p.startswith('torch=='))}, {', '.join(found) or 'no NCCL'}")
    if len(found) != 1:
        print(f"exactly one NCCL may be installed, the gpu extra resolves to {found}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
