"""TLS by files in PEM: what a server shows and asks for, and what a caller trusts and shows.

Files are read when a server binds and when a caller connects. A server's new certificate is for its next start, a
caller's for its next connection.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.core.errors import ConfigError

if TYPE_CHECKING:  # commands and settings load this, and most of them no grpc
    import grpc


@dataclass(frozen=True, slots=True)
class Tls:
    """A caller's. `ca_file` has the authorities that it trusts, None: those that grpc knows; the other two are its own
    certificate, for servers that ask for one."""

    ca_file: Path | str | None = None
    cert_file: Path | str | None = None
    key_file: Path | str | None = None

    def check(self) -> None:
        """Raises ConfigError for files that are missing, that are none of these, or that do not belong together."""
        self.context()

    def context(self) -> ssl.SSLContext:
        """For a socket; without `ca_file` it trusts whom the system does. Raises ConfigError."""
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigError("a certificate and its key go together; only one of cert_file and key_file is set")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.ca_file is None:
            context.load_default_certs()
        _load_authorities(context, self.ca_file)
        _load_identity(context, self.cert_file, self.key_file)
        return context

    def credentials(self) -> grpc.ChannelCredentials:
        """For a channel. Raises ConfigError, as `check` does."""
        import grpc

        self.check()
        return grpc.ssl_channel_credentials(_read(self.ca_file), _read(self.key_file), _read(self.cert_file))


@dataclass(frozen=True, slots=True)
class ServerTls:
    """A server's. Who calls must show a certificate by an authority of `client_ca_file`; None: it need not."""

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """For a port. Raises ConfigError."""
        import grpc

        self.context()
        identity = (_read(self.key_file) or b"", _read(self.cert_file) or b"")
        asks = self.client_ca_file is not None
        return grpc.ssl_server_credentials([identity], _read(self.client_ca_file), require_client_auth=asks)

    def context(self) -> ssl.SSLContext:
        """For a socket. Raises ConfigError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _load_identity(context, self.cert_file, self.key_file)
        if self.client_ca_file is not None:
            _load_authorities(context, self.client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _load_authorities(context: ssl.SSLContext, path: Path | str | None) -> None:
    if path is None:
        return
    try:
        context.load_verify_locations(Path(path).expanduser())
    except OSError as error:  # which ssl.SSLError is, too
        raise ConfigError(f"{path}: no certificates to trust: {_told(error)}") from None


def _load_identity(context: ssl.SSLContext, cert: Path | str | None, key: Path | str | None) -> None:
    if cert is None or key is None:
        return
    try:
        # Without a password: openssl would ask for it on the terminal.
        context.load_cert_chain(Path(cert).expanduser(), Path(key).expanduser(), password=lambda: "")
    except OSError as error:
        raise ConfigError(f"{cert} and {key}: no certificate with its key: {_told(error)}") from None


def _told(error: OSError) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return (reason or type(error).__name__).lower().replace("_", " ")


def _read(path: Path | str | None) -> bytes | None:
    return None if path is None else Path(path).expanduser().read_bytes()
