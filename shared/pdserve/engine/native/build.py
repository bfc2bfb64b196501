"""From a C file to a loaded library: compiled once for a machine, kept, loaded by ctypes.

They are kept beside the models, or in `PDSERVE_KERNELS` where the models' folder is not to be written to.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pdserve.core.errors import PdserveError
from pdserve.engine.fetch import cache_folder

FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fPIC", "-Wno-unknown-pragmas")
SECONDS = 60.0  # for a compiler that takes one


class NativeError(PdserveError):
    """No kernel: there is no compiler, or it does not take the source, or the library does not load."""


def load(source: Path, defines: Mapping[str, int]) -> ctypes.CDLL:
    """The library of a C file, compiled with `defines` unless an equal one is kept. Raises NativeError.

    It is kept by what it depends on: source and the headers beside it, definitions, flags, the compiler's file, the
    processor's features. In a folder that somebody else may write to none is kept or loaded.
    """
    name = os.environ.get("CC") or "cc"
    compiler = shutil.which(name)
    if compiler is None:
        raise NativeError(f"there is no C compiler ({name}) here")
    openmp = _openmp()
    flags = [*FLAGS, *(["-fopenmp"] if openmp else []), *(f"-D{name}={value}" for name, value in defines.items())]
    stat = os.stat(compiler)
    parts = [
        *(path.read_text(encoding="utf-8") for path in (source, *sorted(source.parent.glob("*.h")))),
        *flags,
        compiler,
        str(stat.st_size),
        str(stat.st_mtime_ns),
        _processor(),
    ]
    file = f"{source.stem}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.so"
    try:
        folder = _folder()
        library = folder / file
        if not library.exists():
            _compile(compiler, flags, source, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeError(f"cannot keep or load {file}: {error}") from error


def _compile(compiler: str, flags: list[str], source: Path, library: Path) -> None:
    """Into a file of its own first, so that processes that start side by side find a whole one or none.

    Linked without OpenMP's flag: torch's own runtime has been made visible (see `_openmp`), and a second one would
    fight over the cores with it.
    """
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as scratch:
        compiled, linked = f"{scratch}/kernel.o", f"{scratch}/kernel.so"
        for command in (
            [compiler, *flags, "-c", str(source), "-o", compiled],
            [compiler, "-shared", compiled, "-lm", "-o", linked],
        ):
            try:
                subprocess.run(
                    command, check=True, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL
                )
            except subprocess.CalledProcessError as error:
                first = next(iter(error.stderr.strip().splitlines()), f"it ended with code {error.returncode}")
                raise NativeError(f"{compiler} does not compile {source.name}: {first}") from error
            except subprocess.TimeoutExpired as error:
                raise NativeError(f"{compiler} took more than {SECONDS:.0f} s for {source.name}") from error
        os.replace(linked, library)


def _folder() -> Path:
    folder = Path(os.environ.get("PDSERVE_KERNELS") or cache_folder() / ".native")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    stat = folder.stat()
    if stat.st_uid != os.geteuid() or stat.st_mode & 0o022:
        raise NativeError(f"others may write to {folder}")
    return folder


def _processor() -> str:
    """What -march=native looks at, so that a folder that machines share is safe."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _openmp() -> bool:
    """Whether this process has an OpenMP runtime, torch's; what it offers is made visible to libraries to come."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    found = {line.split()[-1] for line in maps if "/libgomp" in line or "/libiomp5" in line}
    for path in found:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    return bool(found)
