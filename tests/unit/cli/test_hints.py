"""What grpc says of TLS that was not agreed upon, with what it means."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.cli.console import _plainly
from pdserve.client import NO_RETRIES, Client, Tls
from pdserve.core.errors import Unavailable
from pdserve.rpc.server import GrpcServer
from pdserve.rpc.settings import ServiceSettings
from tests.certificates import authority


@pytest.mark.parametrize(
    ("server", "client", "says"),
    [
        ("none", "ours", "speaks no TLS"),
        ("ours", "none", "does it want TLS"),
        ("ours", "theirs", "no authority in --tls-ca-file"),
        ("mutual", "ours", "or a certificate"),
    ],
)
async def test_a_command_says_what_is_wrong_with_tls(tmp_path: Path, server: str, client: str, says: str) -> None:
    ours, theirs = authority(tmp_path), authority(tmp_path, "theirs")
    own = ours.issue("own")
    settings = {
        "none": ServiceSettings(),
        "ours": ServiceSettings(tls_cert_file=own.cert, tls_key_file=own.key),
        "mutual": ServiceSettings(tls_cert_file=own.cert, tls_key_file=own.key, tls_client_ca_file=ours.cert),
    }[server]
    tls = {"none": None, "ours": Tls(ours.cert), "theirs": Tls(theirs.cert)}[client]
    async with (
        GrpcServer(settings, []) as made,
        Client(made.endpoint, retry=NO_RETRIES, tls=tls) as asking,
    ):
        with pytest.raises(Unavailable) as error:
            await asking.models()
    assert says in _plainly(str(error.value))
