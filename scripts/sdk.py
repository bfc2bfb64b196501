"""Generate clients of the public API into build/sdk/<language>, with buf and the plugins that are on this machine.

usage: python scripts/sdk.py [--install] [LANGUAGE ...]

Without LANGUAGE all are tried, and those whose plugins are missing are listed with what would bring them. `--install`
brings them first, where that can be done: as root, on Debian and its like. sdk/README.md shows the clients in use.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from google.rpc import status_pb2  # type: ignore[import-untyped, unused-ignore]

ROOT = Path(__file__).resolve().parent.parent
SDK = ROOT / "build" / "sdk"
DETAILS = ("status.proto", "error_details.proto")  # of google.rpc
NODE = SDK / "examples" / "typescript"
JAVA_GRPC = "/usr/share/java/grpc-netty.jar"
NODE_20 = "process.exit(parseInt(process.versions.node) >= 20 ? 0 : 1)"
GRPC_HEADER = "grpcpp/version_info.h"
GO_PROTOBUF = "/usr/share/gocode/src/google.golang.org/protobuf"
GO_GRPC = "/usr/share/gocode/src/google.golang.org/grpc"

Probe = tuple[str, ...]  # a command that ends well where something is there


class CommandFailed(Exception):
    """A tool that was there did not do its work; with what it said."""


@dataclass(frozen=True, slots=True)
class Language:
    """What it takes to generate a language's client, and to build and run its example; and the Debian packages."""

    plugins: tuple[str, ...] = ()
    example: Mapping[str, Probe] = field(default_factory=dict)
    packages: str = ""


LANGUAGES = {
    "python": Language(),
    "typescript": Language(("node", "npm"), {"Node 20": ("node", "--eval", NODE_20)}, "nodejs npm"),
    "go": Language(
        ("protoc-gen-go", "protoc-gen-go-grpc"),
        {"go": ("go", "version"), "its protobuf and grpc": ("test", "-d", GO_PROTOBUF, "-a", "-d", GO_GRPC)},
        # Names protobuf 1.5, because grpc by itself would take 1.3, which the generated code does not compile with.
        "golang-go golang-google-grpc-dev golang-github-golang-protobuf-1-5-dev protoc-gen-go-1-5 protoc-gen-go-grpc",
    ),
    "java": Language(
        ("protoc", "grpc_java_plugin"),
        {"javac": ("javac", "-version"), "its grpc": ("test", "-e", JAVA_GRPC)},
        "default-jdk-headless libgrpc-java libnetty-java libperfmark-java libprotobuf-java "
        "protobuf-compiler protobuf-compiler-grpc-java-plugin",
    ),
    "cpp": Language(
        ("protoc", "grpc_cpp_plugin"),
        {
            "cmake": ("cmake", "--version"),
            "a C++ compiler with grpc": ("c++", "-E", "-x", "c++", "-include", GRPC_HEADER, "/dev/null"),
        },
        "g++ cmake libgrpc++-dev protobuf-compiler protobuf-compiler-grpc",
    ),
    "ruby": Language(
        ("protoc", "grpc_ruby_plugin"),
        {"ruby with grpc": ("ruby", "-e", "require 'grpc'")},
        "ruby ruby-grpc protobuf-compiler protobuf-compiler-grpc",
    ),
}


def missing_plugins(language: str) -> list[str]:
    return [command for command in LANGUAGES[language].plugins if shutil.which(command) is None]


def missing_for_example(language: str) -> list[str]:
    """What building and running the example lacks; empty where it can be done."""
    probes = LANGUAGES[language].example.items()
    return missing_plugins(language) + [name for name, probe in probes if not _there(probe)]


def _there(probe: Probe) -> bool:
    return (
        shutil.which(probe[0]) is not None and subprocess.run(probe, capture_output=True, check=False).returncode == 0
    )


def install(languages: Iterable[str]) -> None:
    """Bring what is missing from Debian's packages. Raises CommandFailed, or SystemExit where only root could."""
    needed = sorted(
        {package for name in languages if missing_for_example(name) for package in LANGUAGES[name].packages.split()}
    )
    if not needed:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SystemExit(f"only root on Debian can install these here: {' '.join(needed)}")
    print("Installing", *needed)
    for command in (["update"], ["install", "--yes", "--no-install-recommends", *needed]):
        _run(["apt-get", "-o", "DPkg::Lock::Timeout=300", *command], ROOT, DEBIAN_FRONTEND="noninteractive")


def gather_protos() -> None:
    """Copy to build/sdk/protos the protos and those of the details that errors carry; templates pick from them."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "protos" / "pdserve", Path(folder, "pdserve"))
        Path(folder, "google", "rpc").mkdir(parents=True)
        for name in DETAILS:
            shutil.copy(Path(status_pb2.__file__).with_name(name), Path(folder, "google", "rpc"))
        mirror(Path(folder), SDK / "protos")


def generate(language: str) -> int:
    """Write a language's client and return the number of its files. Raises CommandFailed where buf or npm fails."""
    if language == "typescript":
        install_node_modules()
    bin_dir = Path(sys.executable).parent  # where buf is, activated venv or not
    path = f"{bin_dir}{os.pathsep}{os.environ.get('PATH', '')}"
    with tempfile.TemporaryDirectory() as folder:
        template = f"sdk/buf.gen.{language}.yaml"
        _run(["buf", "generate", "--template", template, "--output", folder], ROOT, PATH=path)
        return mirror(Path(folder, "build", "sdk", language), SDK / language)


def install_node_modules() -> None:
    """`npm ci` for the TypeScript project, unless its lock file is the one that was installed last."""
    NODE.mkdir(parents=True, exist_ok=True)
    source = ROOT / "sdk" / "examples" / "typescript"
    installed = NODE / "node_modules" / "installed-package-lock.json"
    if installed.exists() and filecmp.cmp(installed, source / "package-lock.json", shallow=False):
        return
    for name in ("package.json", "package-lock.json"):
        shutil.copyfile(source / name, NODE / name)
    _run(["npm", "ci", "--no-audit", "--no-fund"], NODE)
    shutil.copyfile(source / "package-lock.json", installed)


def mirror(source: Path, target: Path) -> int:
    """Make `target` hold what `source` does and return the number of files. Equal ones stay, so builds stay fresh."""
    names = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    for path in [path for path in target.rglob("*") if path.is_file()]:
        if path.relative_to(target) not in names:
            path.unlink()
    for name in names:
        if not (target / name).exists() or not filecmp.cmp(source / name, target / name, shallow=False):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
    return len(names)


def _run(command: list[str], folder: Path, **environment: str) -> None:
    settings = {**os.environ, **environment}
    done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandFailed(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def report(languages: Iterable[str], files: dict[str, int]) -> Iterator[str]:
    """A line for each language: what there is now, and what would bring the rest."""
    for name in languages:
        client = f"build/sdk/{name}, {files[name]} files" if name in files else "not generated"
        lacks = missing_for_example(name)
        wants = f"missing: {', '.join(lacks)} (Debian: {LANGUAGES[name].packages})"
        yield f"{name:<12}{client:<34}{wants if lacks else f'example: make -C sdk/examples/{name} run'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("languages", nargs="*", metavar="LANGUAGE", help=", ".join(LANGUAGES))
    parser.add_argument("--install", action="store_true", help="install what is missing first")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.languages if name not in LANGUAGES]:
        parser.error(f"no such language: {', '.join(unknown)}; there are {', '.join(LANGUAGES)}")
    languages = arguments.languages or list(LANGUAGES)
    if arguments.install:
        try:
            install(languages)
        except CommandFailed as error:
            raise SystemExit(str(error)) from None
    gather_protos()
    files, failed = {}, False
    for name in languages:
        if missing_plugins(name):
            failed |= name in arguments.languages
            continue
        try:
            files[name] = generate(name)
        except CommandFailed as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed = True
    print(*report(languages, files), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
