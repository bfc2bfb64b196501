"""Make a virtual environment and install pdserve into it, with the torch build that fits this machine.

usage: python scripts/install.py VENV

Without an NVIDIA GPU, a CPU build of torch is taken if one can be had: from pip's own sources, else from PyTorch's CPU
index. The default build on PyPI brings gigabytes of CUDA with it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch>=2.9,<2.14"  # as in pyproject.toml's extra `worker`
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
GPU_PACKAGES = ("nvidia-", "cuda-", "triton")


def has_gpu() -> bool:
    """Whether an NVIDIA driver answers on this machine."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True, check=False).returncode == 0


def cpu_build(python: Path, *sources: str) -> str | None:
    """The exact requirement that pip would install from `sources` for torch, if that is a CPU build."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
    result = subprocess.run([*command, "--report", "-", *sources, TORCH], capture_output=True, text=True, check=False)
    if result.returncode:
        return None
    metadata = json.loads(result.stdout)["install"][0]["metadata"]
    if any(need.startswith(GPU_PACKAGES) for need in metadata.get("requires_dist", [])):
        return None
    return f"torch=={metadata['version']}"


def install_torch(python: Path) -> None:
    """Install a CPU build where there is no GPU and one can be had; else leave torch to the extra's requirement."""
    if has_gpu():
        tell("An NVIDIA GPU is here: its default torch, some 3 GB. For flash-attn and NCCL: pip install -e '.[gpu]'")
        return
    tell("No NVIDIA GPU: looking for a CPU build of torch")
    for sources in ((), ("--index-url", TORCH_CPU_INDEX)):
        if requirement := cpu_build(python, *sources):
            tell(f"Installing {requirement}: some 200 MB, a minute or two")
            run(python, "-m", "pip", "install", "--quiet", *sources, requirement)
            return
    tell("There is none to be had: the default build it is, several gigabytes")


def tell(step: str) -> None:
    """Say what comes next: pip is quiet, and silence for minutes looks like a hang."""
    print(step, flush=True)


def run(python: Path, *arguments: str) -> None:
    subprocess.run([str(python), *arguments], check=True, cwd=ROOT)


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 (whoever runs this may have an older one)
        print(f"pdserve needs Python 3.11 or newer, this is {sys.version.split()[0]}: make PYTHON=python3.11 ...")
        return 1
    folder = Path(sys.argv[1])
    python = folder / "bin" / "python"
    if not python.exists():
        tell(f"Making {folder}: a virtual environment of {sys.executable}")
        venv.create(folder, with_pip=True)
    install_torch(python.absolute())
    tell("Installing pdserve and what it needs, its tools for tests and docs among them: some 150 MB, a minute or two")
    run(python.absolute(), "-m", "pip", "install", "--quiet", "--editable", ".[worker,dev]")
    tell(f"Done: {folder / 'bin' / 'pdserve'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
