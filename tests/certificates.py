"""Authorities and certificates for tests, made by openssl."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"


@dataclass(frozen=True, slots=True)
class Certificate:
    """`cert` and `key` are files in PEM."""

    cert: Path
    key: Path

    def issue(self, name: str, names: str = NAMES) -> Certificate:
        """One by this authority, for this machine unless `names` says otherwise."""
        made = Certificate(self.cert.with_name(f"{name}.pem"), self.cert.with_name(f"{name}.key"))
        signed = ["-CA", str(self.cert), "-CAkey", str(self.key), "-addext", names]
        _openssl(made, name, *signed, "-addext", "basicConstraints=critical,CA:FALSE")
        return made


def authority(folder: Path, name: str = "authority") -> Certificate:
    """A new one. Skips the test where there is no openssl to make it."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is not here, which makes the certificates")
    folder.mkdir(parents=True, exist_ok=True)
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    _openssl(made, name)
    return made


def _openssl(made: Certificate, name: str, *more: str) -> None:
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", str(made.key), "-out", str(made.cert), "-subj", f"/CN={name}", "-days", "2"]
    subprocess.run([*new, *files, *more], check=True, capture_output=True)
