"""TLS by files: what belongs together, and what is said where it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from pdserve.core.errors import ConfigError
from pdserve.rpc.settings import CallingSettings, ServiceSettings
from pdserve.rpc.tls import ServerTls, Tls
from tests.certificates import authority


def test_files_that_belong_together(tmp_path: Path) -> None:
    ours = authority(tmp_path)
    one, other = ours.issue("one"), ours.issue("other")
    Tls(ours.cert, one.cert, one.key).check()
    ServerTls(one.cert, one.key, ours.cert).context()
    for wrong in (
        Tls(ours.cert, one.cert),
        Tls(ours.cert, one.cert, other.key),
        Tls(one.key),
        Tls(tmp_path / "nothing"),
    ):
        with pytest.raises(ConfigError):
            wrong.credentials()
    for server in (
        ServerTls(one.cert, other.key),
        ServerTls(one.cert, tmp_path / "nothing"),
        ServerTls(one.cert, one.key, one.key),
    ):
        with pytest.raises(ConfigError, match=str(tmp_path)):
            server.credentials()


def test_a_key_with_a_password_is_refused_and_not_asked_for(tmp_path: Path) -> None:
    ours = authority(tmp_path)
    ours.key.write_text(
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIGj\n-----END ENCRYPTED PRIVATE KEY-----\n", encoding="ascii"
    )
    with pytest.raises(ConfigError, match="no certificate with its key"):
        ServerTls(ours.cert, ours.key).context()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tls_cert_file": "a"}, "tls-cert-file is set, and tls-key-file is not"),
        ({"tls_key_file": "a"}, "tls-key-file is set, and tls-cert-file is not"),
        ({"tls_client_ca_file": "a"}, "there is no TLS without tls-cert-file"),
    ],
)
def test_settings_that_need_another(fields: dict[str, str], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ServiceSettings(**fields)  # type: ignore[arg-type]


def test_what_settings_mean() -> None:
    plain = CallingSettings()
    assert plain.server_tls is None and plain.caller_tls is None
    both = CallingSettings(tls_cert_file=Path("c"), tls_key_file=Path("k"), tls_ca_file=Path("a"))
    assert both.server_tls == ServerTls(Path("c"), Path("k")) and both.caller_tls == Tls(
        Path("a"), Path("c"), Path("k")
    )
