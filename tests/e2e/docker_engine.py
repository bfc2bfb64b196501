"""A Docker engine for tests: the one that is here, or, for root, one of our own that ends with them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PYTHON_IMAGE = "python:3.11-slim-bookworm"
OWN_PYTHON_IMAGE = "pdserve-test/python:3.11"
PACKAGES = "apt-get install docker.io docker-compose debootstrap"
# What starts Compose: v2, and the older command.
COMPOSES = (("docker", "compose"), ("docker-compose",))
_LISTENS = "API listen on"
_START_SECONDS = 60.0
_PULL_SECONDS = 180.0
_MIRROR = "http://deb.debian.org/debian"
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


class NoEngine(Exception):
    """Containers cannot be run here; says why."""


@dataclass(frozen=True)
class Engine:
    """`compose` are the words that start Compose; `environment` is what every command gets."""

    compose: tuple[str, ...]
    environment: Mapping[str, str]

    def run(self, *command: str, timeout: float = 120.0, check: bool = True) -> str:
        """The stdout of a command. AssertionError, with the end of what it said, where it fails or takes too long."""
        try:
            result = subprocess.run(
                command,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{' '.join(command)} took more than {timeout} s: {error.output!r:.4000}") from None
        if check and result.returncode:
            said = (result.stdout + result.stderr)[-4000:]
            raise AssertionError(f"{' '.join(command)} ended with {result.returncode}:\n{said}")
        return result.stdout if not result.returncode else ""


@contextmanager
def docker_engine() -> Iterator[Engine]:
    """An engine that answers, with Compose. Raises NoEngine."""
    if shutil.which("docker") is None:
        raise NoEngine(f"docker is not installed ({PACKAGES})")
    compose = _find_compose()
    problem = _problem({})
    if problem is None:
        yield Engine(compose, {})
        return
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        raise NoEngine(f"no engine answers, and only root can start one, where dockerd is installed: {problem}")
    with tempfile.TemporaryDirectory(prefix="pdserve-docker-") as folder, _own_engine(Path(folder)) as environment:
        yield Engine(compose, environment)


def python_image(engine: Engine) -> str:
    """The image to build on: the official one where a registry can be reached, else Debian's own Python.

    Raises NoEngine where there is neither.
    """
    if engine.run("docker", "image", "ls", "--quiet", PYTHON_IMAGE):
        return PYTHON_IMAGE
    if engine.run("docker", "image", "ls", "--quiet", OWN_PYTHON_IMAGE):
        return OWN_PYTHON_IMAGE
    try:
        engine.run("docker", "pull", "--quiet", PYTHON_IMAGE, timeout=_PULL_SECONDS)
        return PYTHON_IMAGE
    except AssertionError as error:
        if os.geteuid() != 0 or shutil.which("debootstrap") is None:
            raise NoEngine(
                f"no registry has {PYTHON_IMAGE}, and there is no debootstrap to make one: {error}"
            ) from None
    with tempfile.TemporaryDirectory(prefix="pdserve-rootfs-") as folder:
        _bootstrap(engine, Path(folder))
    return OWN_PYTHON_IMAGE


def _bootstrap(engine: Engine, root: Path) -> None:
    """Import Debian with Python as OWN_PYTHON_IMAGE. It trusts what this machine trusts, for builds behind a proxy."""
    packages = "python3,python3-venv,python3-pip,python-is-python3,ca-certificates"
    options = ("--variant=minbase", f"--include={packages}")
    engine.run("debootstrap", *options, "bookworm", str(root), _MIRROR, timeout=900)
    if _CERTIFICATES.is_file():
        shutil.copyfile(_CERTIFICATES, root / _CERTIFICATES.relative_to("/"))
    archive = root.with_suffix(".tar")
    try:
        engine.run("tar", "--create", "--file", str(archive), "--directory", str(root), ".", timeout=300)
        change = f"ENV PIP_CERT={_CERTIFICATES}"
        engine.run("docker", "import", "--change", change, str(archive), OWN_PYTHON_IMAGE, timeout=300)
    finally:
        archive.unlink(missing_ok=True)


def has_compose(compose: tuple[str, ...]) -> bool:
    """Whether one of COMPOSES is installed; it needs no engine to say so."""
    if shutil.which(compose[0]) is None:
        return False
    return subprocess.run([*compose, "version"], capture_output=True, check=False).returncode == 0


def _find_compose() -> tuple[str, ...]:
    """Compose v2 where it is here, else the older command."""
    for compose in COMPOSES:
        if has_compose(compose):
            return compose
    raise NoEngine(f"neither `docker compose` nor docker-compose is installed ({PACKAGES})")


def _problem(environment: Mapping[str, str]) -> str | None:
    """Why no engine answers, or None."""
    command = ["docker", "info", "--format", "{{.ServerVersion}}"]
    result = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=60
    )
    return (result.stderr or result.stdout).strip() if result.returncode else None


@contextmanager
def _own_engine(folder: Path) -> Iterator[dict[str, str]]:
    """A dockerd whose state is all in `folder`; the environment that leads commands to it."""
    host = f"unix://{folder}/docker.sock"
    places = ("--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid")
    daemon = subprocess.Popen(
        ["dockerd", *places, "--host", host], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    lines: list[str] = []
    listens = threading.Event()

    def read(errors: Sequence[str]) -> None:
        for line in errors:
            lines.append(line)
            if _LISTENS in line:
                listens.set()
        listens.set()  # it ended

    assert daemon.stderr is not None
    reader = threading.Thread(target=read, args=(daemon.stderr,), daemon=True)
    reader.start()
    try:
        if not listens.wait(_START_SECONDS) or daemon.poll() is not None:
            raise NoEngine(f"dockerd did not start: {''.join(lines[-3:])}")
        environment = {"DOCKER_HOST": host}
        if problem := _problem(environment):
            raise NoEngine(f"dockerd started and does not answer: {problem}")
        yield environment
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(60)
        reader.join(10)
        daemon.stderr.close()
        _unmount_below(folder)


def _unmount_below(folder: Path) -> None:
    """Unmount what a daemon that ran containers leaves: its network namespace, and what a kill would leave."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for place in reversed([place for place in mounts if Path(place).is_relative_to(folder)]):
        subprocess.run(["umount", "--lazy", place], check=True, capture_output=True)
