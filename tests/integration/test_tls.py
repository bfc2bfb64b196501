"""A whole suite over mutual TLS: prefill, transfer, decode, prefix cache, router, gateway, clients and probes."""

from __future__ import annotations

import asyncio
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.client import NO_RETRIES, Client, Finish, Session, SyncClient
from pdserve.core.errors import Unavailable
from pdserve.launch import ModelPart, TlsFiles
from pdserve.rpc import healthcheck
from pdserve.rpc.tls import Tls
from pdserve.testing import Cluster, wait_all_free
from tests.certificates import Certificate, authority
from tests.integration.suites import prompt, serve
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def client(ours: Certificate) -> Tls:
    """What a client has."""
    own = ours.issue("client")
    return Tls(ours.cert, own.cert, own.key)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(ours: Certificate, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("tls")
    own = ours.issue("service")
    part = ModelPart(make_tiny_model(folder / "model"), "tiny", prefill=1, decode=1)
    tls = TlsFiles(own.cert, own.key, ours.cert, ours.cert)
    async with serve(folder / "logs", part, prefix_caches=1, gateways=1, tls=tls) as made:
        yield made


async def test_a_suite_answers_over_tls(cluster: Cluster, client: Tls) -> None:
    """KV goes from prefill to decode, whose link's control stream is TLS, too; both clients and a session get it."""
    answer = await cluster.client.complete(prompt(100), max_tokens=8, temperature=0.0, ignore_eos=True)
    assert len(answer.token_ids) == 8 and answer.finish.usage.kv_transfer_bytes > 0

    def ask() -> tuple[int, ...]:
        with SyncClient(cluster.endpoint, tls=client) as other:
            return other.complete(prompt(100), max_tokens=8, temperature=0.0, ignore_eos=True).token_ids

    assert await asyncio.to_thread(ask) == answer.token_ids
    async with (
        Session(cluster.endpoint, tls=client) as session,
        session.generate("hi", max_tokens=4) as events,
    ):
        assert [type(event) async for event in events][-1] is Finish
    await cluster.assert_all_free()


@pytest.mark.parametrize("who", ["without TLS", "without a certificate", "another authority's", "not trusting"])
async def test_who_has_not_what_is_asked_for_is_refused(
    cluster: Cluster, ours: Certificate, client: Tls, who: str, tmp_path: Path
) -> None:
    theirs = authority(tmp_path, "theirs")
    other = theirs.issue("stranger")
    tls = {
        "without TLS": None,
        "without a certificate": Tls(ours.cert),
        "another authority's": Tls(ours.cert, other.cert, other.key),
        "not trusting": Tls(theirs.cert, client.cert_file, client.key_file),
    }[who]
    async with Client(cluster.endpoint, retry=NO_RETRIES, tls=tls) as stranger:
        with pytest.raises(Unavailable):
            await stranger.models()
    access = cluster.access  # the secret alone does not do
    with pytest.raises(Unavailable):
        await wait_all_free(cluster.workers["decode-0"].endpoint, access=type(access)(access.secret, tls))


async def test_the_gateway_speaks_https_to_who_shows_a_certificate(
    cluster: Cluster, ours: Certificate, client: Tls
) -> None:
    def get(tls: Tls) -> int:
        with urllib.request.urlopen(f"{cluster.http}/v1/models", timeout=30, context=tls.context()) as answer:
            status: int = answer.status
            return status

    assert cluster.http.startswith("https://") and await asyncio.to_thread(get, client) == 200
    with pytest.raises(OSError):  # by TLS 1.3 a client hears of it when it reads
        await asyncio.to_thread(get, Tls(ours.cert))


async def command(*words: str) -> tuple[int | None, str, str]:
    """Exit status, stdout and stderr of the command line."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdserve.cli", *words), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode(), err.decode()


async def test_commands_through_tls(cluster: Cluster, client: Tls) -> None:
    """To the router, and to the workers themselves."""
    tls = ["--tls-ca-file", str(client.ca_file), "--tls-cert-file", str(client.cert_file)]
    tls += ["--tls-key-file", str(client.key_file)]
    where = ["--target", cluster.endpoint, "--connect-timeout", "1"]
    secret = ["--internal-secret-file", str(cluster.suite.internal_secret_file)]
    status, out, _ = await command(*tls, "status", "--json", *where)
    assert status == 0 and len(out.splitlines()) == 3
    status, _, err = await command(*tls, "probe", "links", *where, *secret, "--bytes", "64KiB", "--json")
    assert status in (0, 1) and "cannot" not in err  # 1: slower than its prefill worker, on a busy machine
    assert (await command("status", *where))[0] == 1
    status, _, err = await command("--tls-ca-file", "/nothing", "status", *where)
    assert status == 2 and "/nothing: no certificates to trust" in err


async def test_probes_through_tls(cluster: Cluster, client: Tls, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tls-ca-file", str(client.ca_file), "--tls-cert-file", str(client.cert_file)]
    flags += ["--tls-key-file", str(client.key_file)]
    for target in (cluster.endpoint, *(one.endpoint for one in cluster.suite.workers), f"{cluster.http}/health"):
        assert await asyncio.to_thread(healthcheck.main, [target, *flags]) == 0, capsys.readouterr().out
        assert await asyncio.to_thread(healthcheck.main, [target, *flags[:2]]) == 1
    assert await asyncio.to_thread(healthcheck.main, [cluster.endpoint, "--tls-ca-file", "/nothing"]) == 1
    assert "/nothing: no certificates to trust: no such file" in capsys.readouterr().out
