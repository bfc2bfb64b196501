"""Ask PyPI's advisory database about every version that the images install.

usage: python -m scripts.audit [--strict]

Ends with 1 where a pin has a known vulnerability, or where the database knows some of the pins and not others. Without
a database (no network, or an index that has no advisories) nothing can be said, which is printed as NOT AUDITED; then
it ends with 0, and with --strict with 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from scripts.lock import FOLDER

# Sets that are installed together: a package stands in each of them once.
SETS = (("base.txt", "worker.txt", "torch-cpu.txt"), ("torch-gpu.txt", "flash-attn.txt"))
# Advisories that do not concern pdserve, by id, with the reason.
ACCEPTED: dict[str, str] = {}
TIMEOUT = 90.0  # seconds
# How pip-audit ends where it reaches nobody: with a traceback of requests.
_UNREACHED = "requests.exceptions."


class NotAudited(Exception):
    """Nothing can be said, and why."""


def ask(files: Iterable[str]) -> list[dict[str, Any]]:
    """What pip-audit says of each package. Raises NotAudited, and RuntimeError where it fails by itself."""
    pins = [word for name in files for word in ("--requirement", str(FOLDER / name))]
    options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
    command = [sys.executable, "-m", "pip_audit", *options, *pins]
    try:
        result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise NotAudited(f"the advisory database did not answer within {TIMEOUT:.0f} s") from None
    try:
        found: list[dict[str, Any]] = json.loads(result.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = next(iter(result.stderr.strip().splitlines()[-1:]), f"it ended with {result.returncode}")
        if last.startswith(_UNREACHED):
            raise NotAudited(f"the advisory database cannot be reached: {last}") from None
        raise RuntimeError(f"pip-audit: {last}") from None
    return found


def judge(packages: Iterable[dict[str, Any]]) -> tuple[int, list[str]]:
    """How many pins the database knows, and a sentence for each problem. Raises NotAudited where it knows none."""
    packages = list(packages)
    unknown = [package["skip_reason"] for package in packages if "skip_reason" in package]
    if len(unknown) == len(packages):
        raise NotAudited(f"the index that was asked has no advisories: it knows none of {len(packages)} pins")
    return len(packages) - len(unknown), [*unknown, *_vulnerabilities(packages)]


def _vulnerabilities(packages: Iterable[dict[str, Any]]) -> Iterator[str]:
    for package in packages:
        for found in package.get("vulns", ()):
            if not {found["id"], *found.get("aliases", ())} & ACCEPTED.keys():
                fixed = ", ".join(found["fix_versions"]) or "no version yet"
                yield f"{package['name']} {package['version']}: {found['id']}, fixed in {fixed}"


def main() -> int:
    try:
        count, problems = judge(package for files in SETS for package in ask(files))
    except NotAudited as why:
        print(f"NOT AUDITED: {why}")
        return 1 if "--strict" in sys.argv[1:] else 0
    except RuntimeError as error:
        print(error)
        return 1
    print(*problems, f"{count} pins audited, {len(problems)} problems", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
