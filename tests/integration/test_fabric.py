"""The state of links as the router, `pdserve status` and `pdserve probe links` show it, by scripted workers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from pdserve.cli.probe_links import probe
from pdserve.client import FleetLink
from pdserve.core.errors import Unavailable
from pdserve.launch import ModelPart
from pdserve.policy.fleet import LinkFacts
from pdserve.v1 import worker_pb2
from tests.integration.scripted_worker import LAYOUT, Context, ScriptedWorker, Wire
from tests.integration.suites import serve
from tests.integration.test_router import suite
from tests.tiny_models import make_tiny_model, write_tiny_tokenizer

LINK = FleetLink("d0", "nccl", "sockets", "no InfiniBand", 10, 20, 2e9, 30, 1, 40, 0.5)
STATE = worker_pb2.LinkState(
    peer="d0",
    transport="nccl",
    path="sockets",
    degraded="no InfiniBand",
    bytes_sent=10,
    bytes_received=20,
    bytes_per_second=2e9,
    bytes_in_flight=30,
    frames_in_flight=1,
    credit_bytes=40,
    round_trip_seconds=0.5,
)


class LinkedWorker(ScriptedWorker):
    """Tells links and a prefill rate, the latter once it has been given a prompt, and answers probes."""

    rate = 0.0
    bandwidth = 1e6
    table: worker_pb2.LinkTable | None = None
    probes: list[worker_pb2.ProbeLinkRequest]

    async def Watch(self, request: worker_pb2.WatchRequest, context: Context) -> AsyncIterator[Any]:
        async for response in super().Watch(request, context):
            if response.HasField("delta"):
                response.delta.load.prefill_tokens_per_second = self.rate if self.seen else 0.0
                if self.table is not None:
                    response.delta.links.CopyFrom(self.table)
            yield response

    async def ProbeLink(self, request: worker_pb2.ProbeLinkRequest, context: Context) -> worker_pb2.ProbeLinkResponse:
        self.probes = [*getattr(self, "probes", []), request]
        if not self.bandwidth:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the link ended")
        answer = worker_pb2.ProbeLinkResponse(transport="gloo", path="loopback", round_trip_seconds=0.001)
        for size in request.frame_bytes or [1 << 16]:
            answer.samples.add(frame_bytes=size, bytes_per_second=self.bandwidth)
        return answer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    write_tiny_tokenizer(folder)
    return folder


def pair(**options: Any) -> tuple[LinkedWorker, LinkedWorker]:
    wire = Wire()
    return LinkedWorker("p0", "prefill", wire, **options), LinkedWorker("d0", "decode", wire, **options)


async def command(*arguments: str) -> tuple[int | None, str, str]:
    """Exit status, stdout and stderr of `pdserve` with `arguments`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdserve.cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_links_reach_policies_clients_and_status(folder: Path) -> None:
    """As told last: a table replaces the one before, and a worker that comes back starts without one."""
    prefill, decode = pair()
    prefill.table = worker_pb2.LinkTable(links=[STATE])
    async with suite(folder, prefill, decode) as made:
        worker = made.fleet.by_id("p0")
        assert worker is not None
        await made.until(lambda: worker.links.links)
        view = worker.view()
        assert view is not None and view.links == {"d0": LinkFacts(2e9, "sockets")}
        told = {worker.worker_id: worker for worker in await made.client.fleet()}
        assert told["p0"].links == (LINK,) and told["d0"].links == ()
        assert (told["p0"].kv_token_bytes, told["p0"].own_endpoint) == (LAYOUT.token_bytes, prefill.endpoint)
        status, out, _ = await command("status", "--target", made.endpoint)
        assert status == 0
        assert "| p0   | d0 | nccl      | sockets | 2.00 | 500.00 |      30 B | ! |" in out
        assert "! p0 to d0 goes over sockets: no InfiniBand" in out
        _, out, _ = await command("status", "--target", made.endpoint, "--json")
        lines = {worker["worker_id"]: worker for worker in map(json.loads, out.splitlines())}
        assert lines["p0"]["links"][0]["bytes_per_second"] == 2e9
        prefill.table = worker_pb2.LinkTable()
        prefill.tell()
        await made.until(lambda: not worker.links.links)
        view = worker.view()
        assert view is not None and view.links == {}


async def test_probing_makes_an_idle_worker_measure_its_rate_first(folder: Path) -> None:
    """One prompt through the router; then the link's bandwidth against KV a token times tokens a second."""
    prefill, decode = pair()
    prefill.rate = 10.0
    prefill.bandwidth = 37.0 * 10 * LAYOUT.token_bytes
    async with suite(folder, prefill, decode) as made:
        arguments = ("--target", made.endpoint, "--frame-bytes", "64KiB", "--frame-bytes", "100", "--bytes", "1MiB")
        status, out, err = await command("probe", "links", *arguments)
        assert status == 0, out + err
        assert "p0 to d0: this link carries the KV of this prefill worker 37 times over." in out
        assert "64 KiB" in out and "100 B" in out and "has not measured yet" in err
        [request] = prefill.probes
        assert (request.endpoint, request.worker_id) == (decode.endpoint, "d0")
        assert list(request.frame_bytes) == [65536, 100] and request.bytes_per_size == 1 << 20
        [spec] = prefill.seen
        assert len(spec.token_ids) == prefill.max_model_len - 2 and spec.params.max_tokens == 1
        assert not decode.seen, "a single token needs no decode worker"
        status, out, err = await command("probe", "links", *arguments, "--json")
        report = json.loads(out)
        assert status == 0 and not err and report["carries"] is True and report["samples"] == [
            [65536, prefill.bandwidth], [100, prefill.bandwidth],
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("bandwidth", "words"),
    [(0.5, "short by a factor 2.0"), (0.0, "this link could not be probed: the link ended")],
)
async def test_a_link_that_is_too_slow_or_gone_is_exit_status_1(folder: Path, bandwidth: float, words: str) -> None:
    prefill, decode = pair()
    prefill.rate = 10.0
    prefill.bandwidth = bandwidth * 10 * LAYOUT.token_bytes
    async with suite(folder, prefill, decode) as made:
        status, out, _ = await command("probe", "links", "--target", made.endpoint)
        assert status == 1 and words in out


async def test_a_rate_that_never_comes_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.cli.probe_links.RATE_TIMEOUT", 0.05)
    prefill, decode = pair()
    async with suite(folder, prefill, decode) as made:
        [report] = await probe(made.endpoint, [], 1 << 20)
        assert not report.carries and "is not known" in report.sentence()
        assert len(prefill.seen) == 2, "two tries for the only prefill worker"


async def test_a_real_suite_measures_its_links(tmp_path: Path) -> None:
    """Each prefill worker with each decode worker, whether they have served anybody yet or not; and status agrees."""
    part = ModelPart(make_tiny_model(tmp_path / "model"), "tiny", prefill=2, decode=1)
    async with serve(tmp_path / "logs", part) as cluster:
        arguments = ("--target", cluster.endpoint, "--internal-secret-file", str(cluster.suite.internal_secret_file))
        arguments += ("--frame-bytes", "64KiB", "--frame-bytes", "1MiB", "--bytes", "2MiB")
        status, out, err = await command("probe", "links", *arguments, "--json")
        assert status == 0, out + err
        reports = [json.loads(line) for line in out.splitlines()]
        assert [(report["prefill"], report["decode"]) for report in reports] == [
            ("prefill-0", "decode-0"), ("prefill-1", "decode-0"),
        ]  # fmt: skip
        for report in reports:
            assert (report["transport"], report["path"], report["degraded"]) == ("gloo", "loopback", "")
            assert [size for size, _ in report["samples"]] == [64 << 10, 1 << 20]
            assert report["bytes_per_second"] > report["needed_bytes_per_second"] > 0
            assert report["prefill_tokens_per_second"] > 0 and report["round_trip_seconds"] > 0
        expected = {"prefill-0": 1, "prefill-1": 1, "decode-0": 2}
        async with asyncio.timeout(30):  # workers tell of their links once a second
            while {w.worker_id: len(w.links) for w in await cluster.client.fleet()} != expected:
                pass
        status, out, err = await command("probe", "links", *arguments)
        assert status == 0 and out.count("times over") == 2 and "1 MiB" in out and not err


async def test_a_fleet_without_pairs_has_nothing_to_probe(folder: Path) -> None:
    async with suite(folder, pair()[1]) as made:
        with pytest.raises(Unavailable, match="no prefill worker"):
            await probe(made.endpoint, [], 1 << 20)
