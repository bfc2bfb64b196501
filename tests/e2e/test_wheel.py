"""What pip installs has everything: the page's files, the protos and the markers of types, besides the code."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of the files in a wheel of this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    [wheel] = folder.glob("pdserve-*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_has_the_page_and_the_protos(inside: set[str]) -> None:
    page = {f"pdserve/gateway/page/{file.name}" for file in (ROOT / "services/pdserve/gateway/page").iterdir()}
    protos = {f"pdserve/protos/pdserve/v1/{file.name}" for file in (ROOT / "protos/pdserve/v1").glob("*.proto")}
    assert len(page) > 10 and len(protos) > 5
    assert page | protos | {"pdserve/gateway/page_files.py"} <= inside


def test_every_package_in_the_wheel_says_that_it_is_typed(inside: set[str]) -> None:
    """PEP 561: each package right below the namespace has a marker; the namespace's own is for its module `testing`."""
    packages = {found[1] for name in inside if (found := re.fullmatch(r"(pdserve/\w+)/__init__\.py", name))}
    assert {"pdserve/client", "pdserve/core", "pdserve/router"} <= packages
    assert {f"{package}/py.typed" for package in (*packages, "pdserve")} <= inside
