"""What pip installs has everything: the page's files and the protos, besides the code."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_has_the_page_and_the_protos(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("pdserve-*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    page = {f"pdserve/gateway/page/{file.name}" for file in (ROOT / "services/pdserve/gateway/page").iterdir()}
    protos = {f"pdserve/protos/pdserve/v1/{file.name}" for file in (ROOT / "protos/pdserve/v1").glob("*.proto")}
    assert len(page) > 10 and len(protos) > 5
    assert page | protos | {"pdserve/gateway/page_files.py"} <= inside
