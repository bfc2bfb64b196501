"""What `make sdk` promises, short of building anything: tests/e2e/test_sdks.py does that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.sdk import LANGUAGES, mirror

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_language_has_a_template_an_example_and_a_line_in_the_readme(language: str) -> None:
    folder = ROOT / "sdk" / "examples" / language
    assert (ROOT / "sdk" / f"buf.gen.{language}.yaml").exists()
    assert (folder / "Makefile").exists()
    assert any(path.stem.lower() in ("generate", "main") for path in folder.iterdir())
    assert f"`build/sdk/{language}`" in (ROOT / "sdk" / "README.md").read_text()


def test_a_language_without_its_plugins_is_listed_with_what_would_bring_them(tmp_path: Path) -> None:
    """A machine with no toolchain at all: asking for Go fails, and says which plugins and which packages."""
    command = [sys.executable, "scripts/sdk.py", "go"]
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "not generated" in done.stdout
    assert "protoc-gen-go, protoc-gen-go-grpc" in done.stdout
    assert "golang-google-grpc-dev" in done.stdout


def test_mirror_leaves_equal_files_alone_and_removes_the_rest(tmp_path: Path) -> None:
    """Else every `make sdk` would have C++ compiled anew."""
    source, target = tmp_path / "source", tmp_path / "target"
    for folder, files in ((source, {"a/same": "1", "a/new": "2"}), (target, {"a/same": "1", "b/old": "3"})):
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    os.utime(target / "a/same", (1, 1))
    assert mirror(source, target) == 2
    found = {str(path.relative_to(target)): path.read_text() for path in target.rglob("*") if path.is_file()}
    assert found == {"a/same": "1", "a/new": "2"}
    assert (target / "a/same").stat().st_mtime == 1
