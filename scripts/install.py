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
        print("An NVIDIA GPU is here: taking torch's default build. For flash-attn and NCCL: pip install -e '.[gpu]'")
        return
    for sources in ((), ("--index-url", TORCH_CPU_INDEX)):
        if requirement := cpu_build(python, *sources):
            print(f"No NVIDIA GPU: taking the CPU build, {requirement}")
            run(python, "-m", "pip", "install", "--quiet", *sources, requirement)
            return
    print("No NVIDIA GPU, and no CPU build of torch to be had: taking the default build, which is several gigabytes")


def run(python: Path, *arguments: str) -> None:
    subprocess.run([str(python), *arguments], check=True, cwd=ROOT)


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 (whoever runs this may have an older one)
        print(f"pdserve needs Python 3.11 or newer, this is {sys.version.split()[0]}: make PYTHON=python3.11 ...")
        return 1
    folder = Path(sys.argv[1])
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"Making {folder}")
        venv.create(folder, with_pip=True)
    install_torch(python.absolute())
    print("Installing pdserve and its tools")
    run(python.absolute(), "-m", "pip", "install", "--quiet", "--editable", ".[worker,dev]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
