"""The probe of containers says what a service says of itself, and why it could not ask."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pdserve.rpc.healthcheck import main
from pdserve.rpc.server import GrpcServer, Service
from pdserve.rpc.settings import ServiceSettings
from pdserve.v1 import worker_pb2_grpc
from pdserve.worker.service import WorkerServicer
from pdserve.worker.watch import WatchBoard

NAME = "pdserve.v1.WorkerService"


def services() -> list[Service]:
    async def nothing() -> None: ...

    return [(worker_pb2_grpc.add_WorkerServiceServicer_to_server, WorkerServicer(WatchBoard(), nothing), NAME)]


@contextmanager
def http_server(status: int) -> Iterator[str]:
    """The URL of a real server that answers every GET with `status`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """Nothing on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/health"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def closed_port() -> Iterator[int]:
    """A port that is ours and at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


async def test_it_waits_for_what_is_not_there_yet(capsys: pytest.CaptureFixture[str]) -> None:
    """The probe begins before anybody listens, and ends with the first answer."""
    with closed_port() as port:
        waiting = asyncio.create_task(asyncio.to_thread(main, [f"http://127.0.0.1:{port}/", "--wait", "0.5"]))
        assert await waiting == 1 and "refused" in capsys.readouterr().out
    async with GrpcServer(ServiceSettings(), services()) as server:
        arguments = [server.endpoint, "--service", NAME, "--wait", "60"]
        waiting = asyncio.create_task(asyncio.to_thread(main, arguments))
        assert await asyncio.to_thread(main, [server.endpoint, "--service", NAME]) == 1
        await server.set_health(True)
        assert await waiting == 0 and capsys.readouterr().out.count("NOT_SERVING") == 1


async def test_a_grpc_service_is_live_first_and_ready_later(capsys: pytest.CaptureFixture[str]) -> None:
    async with GrpcServer(ServiceSettings(), services()) as server:

        async def probe(*arguments: str) -> int:
            return await asyncio.to_thread(main, [server.endpoint, *arguments])

        assert await probe() == 0
        assert await probe("--service", NAME) == 1
        assert capsys.readouterr().out.endswith(f"{NAME} is NOT_SERVING\n")
        await server.set_ready(True)
        assert await probe("--service", NAME) == 0
        assert await probe("--service", "pdserve.v1.NoSuchService") == 1
        assert "NOT_FOUND" in capsys.readouterr().out


async def test_as_a_command_it_ends_with_the_status() -> None:
    async with GrpcServer(ServiceSettings(), services()) as server:
        for service, status in (("", 0), (NAME, 1)):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pdserve.rpc.healthcheck", server.endpoint, "--service", service),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, errors = await process.communicate()
            assert process.returncode == status and errors == b""
            assert (b"NOT_SERVING" in out) is (status == 1)


def test_nobody_there_is_a_reason_not_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with closed_port() as port:
        assert main([f"127.0.0.1:{port}"]) == 1
        assert "UNAVAILABLE" in capsys.readouterr().out
        assert main([f"http://127.0.0.1:{port}/health"]) == 1
        assert "refused" in capsys.readouterr().out


def test_a_stopped_service_costs_no_more_than_the_timeout(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts; nobody answers
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        assert main([target, "--timeout", "0.2"]) == 1
        assert main([f"http://{target}/health", "--timeout", "0.2"]) == 1
    out = capsys.readouterr().out
    assert "DEADLINE_EXCEEDED" in out and "timed out" in out


def test_http_answers_200_or_it_is_not_ready(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # a proxy of the machine's is not asked
    with http_server(200) as url:
        assert main([url]) == 0
    with http_server(503) as url:
        assert main([url]) == 1
    assert "answered 503" in capsys.readouterr().out


def test_what_cannot_be_asked_is_a_usage_error() -> None:
    for arguments in ([], ["http://127.0.0.1:1/health", "--service", NAME], ["127.0.0.1:1", "--timeout", "soon"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
