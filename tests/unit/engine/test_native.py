"""A kernel is compiled once for a machine, and where it cannot be, the reason is told."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys

import pytest

from pdserve.engine.native.build import NativeError, load

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler on this machine")
SOURCE = "int answer(void) { return ANSWER; }\n"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "answer.c"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """The machine's compiler, in a cache of its own; returns how often it was called."""
    calls, script = tmp_path / "calls", tmp_path / "compiler"
    script.write_text(f'#!/bin/sh\necho >> "{calls}"\nexec {shutil.which("cc")} "$@"\n')
    script.chmod(0o700)
    monkeypatch.setenv("CC", str(script))
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    return lambda: len(calls.read_text().splitlines()) if calls.exists() else 0


def test_equal_sources_are_compiled_once(source, compiler):
    assert load(source, {"ANSWER": 42}).answer() == 42
    compiled = compiler()
    assert load(source, {"ANSWER": 42}).answer() == 42
    assert compiler() == compiled
    assert load(source, {"ANSWER": 43}).answer() == 43
    source.write_text(SOURCE.replace("ANSWER;", "ANSWER + 1;"))
    assert load(source, {"ANSWER": 43}).answer() == 44
    assert compiler() == 3 * compiled


def test_they_can_be_kept_elsewhere(source, compiler, tmp_path, monkeypatch):
    """Where the models' folder is not to be written to."""
    monkeypatch.setenv("PDSERVE_KERNELS", str(tmp_path / "kernels"))
    assert load(source, {"ANSWER": 42}).answer() == 42
    assert [path.suffix for path in (tmp_path / "kernels").iterdir()] == [".so"] and not (tmp_path / "cache").exists()


def test_nothing_is_left_of_a_failed_compilation(source, compiler, tmp_path):
    source.write_text("this is not C\n")
    with pytest.raises(NativeError, match=r"does not compile answer.c: .*answer.c:1"):
        load(source, {})
    assert list((tmp_path / "cache" / ".native").iterdir()) == []


def test_a_folder_that_others_may_write_to_is_refused(source, compiler, tmp_path):
    load(source, {"ANSWER": 1})
    folder = tmp_path / "cache" / ".native"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    with pytest.raises(NativeError, match="others may write to"):
        load(source, {"ANSWER": 1})


def test_a_library_that_does_not_load_is_told(source, compiler, tmp_path):
    code = "import sys, torch; from pathlib import Path; from pdserve.engine.native.build import load; "
    code += "load(Path(sys.argv[1]), {'ANSWER': 1})"
    subprocess.run(
        [sys.executable, "-c", code, source], check=True
    )  # what this process has loaded, it would not load again
    [library] = (tmp_path / "cache" / ".native").iterdir()
    library.write_bytes(b"no library")
    with pytest.raises(NativeError, match="cannot keep or load answer-"):
        load(source, {"ANSWER": 1})
