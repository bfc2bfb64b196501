"""The secret of a suite that is started here: a file that this user alone can read, or one that somebody made."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from pathlib import Path

from pdserve.core.errors import Unavailable

_BYTES = 32


class SecretFile:
    """`given`, which is left alone, or a file of its own from `make` to `remove`."""

    def __init__(self, given: Path | None = None) -> None:
        self._given = given
        self._folder: Path | None = None

    @property
    def path(self) -> Path:
        """Raises Unavailable before `make` and after `remove`, where there is no file."""
        if self._given is not None:
            return self._given
        if self._folder is None:
            raise Unavailable("the suite does not run")
        return self._folder / "internal-secret"

    def make(self) -> None:
        """Raises OSError."""
        if self._given is None and self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="pdserve-run-"))
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(file, "w") as text:
                text.write(secrets.token_urlsafe(_BYTES))

    def remove(self) -> None:
        """May be repeated."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
