"""Pin what the images install: write docker/requirements/{base,worker,torch-cpu}.txt from pyproject.toml.

usage: python -m scripts.lock

Takes the newest releases that fit together, as pip resolves them for this Python. The GPU pins are few, and made by
hand.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.install import ROOT, cpu_build

FOLDER = ROOT / "docker" / "requirements"
HEADER = "# Written by scripts/lock.py.\n"
# The demo model is fetched through pip, which an environment that is filled from outside does not have.
TOOLS = ("pip",)


def resolve(*requirements: str, constraints: Path | None = None) -> dict[str, str]:
    """Version by name of all that pip would install for `requirements` into an empty environment, but for pdserve."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    options = ["--constraint", str(constraints)] if constraints else []
    result = subprocess.run([*command, *options, *requirements], check=True, capture_output=True, text=True, cwd=ROOT)
    found = [item["metadata"] for item in json.loads(result.stdout)["install"]]
    return {item["name"].lower(): item["version"] for item in found if item["name"] != "pdserve"}


def write(name: str, pins: dict[str, str]) -> None:
    lines = [f"{package}=={version}\n" for package, version in sorted(pins.items())]
    (FOLDER / name).write_text(HEADER + "".join(lines), encoding="utf-8")
    print(f"{name}: {len(pins)} packages")


def main() -> int:
    torch = cpu_build(Path(sys.executable))
    if torch is None:
        print("no CPU build of torch to be had here")
        return 1
    base = resolve(".")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.writelines(f"{package}=={version}\n" for package, version in base.items())
        file.flush()
        everything = resolve(".[worker]", torch, *TOOLS, constraints=Path(file.name))
    write("base.txt", base)
    write("torch-cpu.txt", {"torch": everything.pop("torch").split("+")[0]})  # the index says which build
    write("worker.txt", {package: version for package, version in everything.items() if package not in base})
    return 0


if __name__ == "__main__":
    sys.exit(main())
