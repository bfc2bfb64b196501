"""What a process shows when it calls another one, and what a server wants to be shown.

Services of one fleet share a secret, which callers show as metadata of each call. It stands in a file, so that neither
a command line nor an environment has it, and `Secret` keeps it out of whatever is printed of what holds it.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path

from pdserve.core.errors import ConfigError
from pdserve.rpc.tls import Tls

INTERNAL = "x-pdserve-internal"
MIN_SECRET = 16  # characters: 64 bits, where it is random hexadecimal digits
_MAX_SECRET = 1024  # all metadata of a call has 8 KiB


class Secret:
    """A text that is not shown by str() or repr(). `text` is for the wire alone."""

    __slots__ = ("_digest", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._digest = digest_of(text)

    def matches(self, shown: str) -> bool:
        """Whether `shown` is this secret; how long that takes tells nothing about it, nor about its length."""
        return hmac.compare_digest(self._digest, digest_of(shown))

    def __repr__(self) -> str:
        return "Secret(...)"


@dataclass(frozen=True, slots=True)
class Access:
    """What calls carry: the fleet's secret, or nothing; and what goes over TLS."""

    secret: Secret | None = None
    tls: Tls | None = None


PLAIN = Access()
"""Of a process that has nothing to show."""


def access_of(internal_secret_file: Path | None, tls: Tls | None = None) -> Access:
    """What settings name. Raises ConfigError for files that cannot be it."""
    if tls is not None:
        tls.check()
    return Access(read_secret(internal_secret_file) if internal_secret_file else None, tls)


def read_secret(path: Path) -> Secret:
    """The secret in a file, without the white space around it. Raises ConfigError, which does not quote it."""
    try:
        text = path.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        told = (isinstance(error, OSError) and error.strerror) or "it is no text"
        raise ConfigError(f"internal-secret-file {path}: {told.lower()}") from None
    if not MIN_SECRET <= len(text) <= _MAX_SECRET:
        raise ConfigError(
            f"internal-secret-file {path}: a secret has {MIN_SECRET} to {_MAX_SECRET} characters, this has {len(text)}"
        )
    if not all("!" <= character <= "~" for character in text):
        raise ConfigError(f"internal-secret-file {path}: must be one word of printable ASCII characters")
    return Secret(text)


def digest_of(text: str) -> bytes:
    """SHA-256 of a text, whatever characters it has."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
