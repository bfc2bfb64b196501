"""The gateway's own HTTP server before a scripted router: clients that do not read, bugs, and what is passed on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from pdserve.client import Client, Event, EventStream, Output, PromptInfo, Session
from pdserve.core.errors import UnknownRequest
from pdserve.core.sampling import SamplingParams
from pdserve.gateway.app import create_app
from pdserve.gateway.config import GatewaySettings
from pdserve.gateway.metrics import GatewayMetrics
from pdserve.gateway.routers import Routers
from pdserve.gateway.server import HttpServer
from tests.integration.raw_http import JSON, ask

PATH = "/v1/completions"
BODY = {"prompt": "hi", "model": "m"}
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LATER = f"01{PARENT[2:]}-"  # a version that says more
Loop = Callable[[], asyncio.AbstractEventLoop]


class Script(Routers):
    """Routers of one session, and what it was asked. Its answers never end: with `text` they are that, over and over,
    else nothing comes. A `bug` is raised where a session is picked."""

    def __init__(self, text: str = "", bug: Exception | None = None) -> None:
        super().__init__([])
        self.asked: list[dict[str, Any]] = []
        self.closed = asyncio.Event()
        self.told = 0  # outputs
        self._text, self._bug = text, bug

    @contextlib.contextmanager
    def pick_session(self) -> Iterator[Session]:
        yield self  # type: ignore[misc]

    @contextlib.contextmanager
    def pick(self, api_key: str) -> Iterator[Client]:
        if self._bug is not None:
            raise self._bug
        yield self  # type: ignore[misc]

    def clients(self, api_key: str) -> list[Client]:
        return [self]  # type: ignore[list-item]

    async def trace(self, request_id: str) -> Any:
        raise UnknownRequest(f"no request {request_id!r} here")

    def generate(self, prompt: Any, **options: Any) -> EventStream:
        self.asked.append(options)
        return EventStream(self._events())

    async def _events(self) -> AsyncGenerator[Event]:
        try:
            yield PromptInfo("r", "m", 1, SamplingParams(), ())
            while self._text:
                yield Output(self.told, (), self._text)
                self.told += 1
                await asyncio.sleep(0)
            await asyncio.Event().wait()
        finally:
            self.closed.set()


@contextlib.asynccontextmanager
async def serving(
    routers: Script, metrics: GatewayMetrics, seconds: float = 60.0, unread_seconds: float = 60.0
) -> AsyncIterator[str]:
    """The URL of a gateway, which must be able to stop at once when it is left."""
    limits = ["--max-request-seconds", str(seconds), "--unread-seconds", str(unread_seconds)]
    settings = GatewaySettings.load(["--port", "0", "--drain-seconds", "300", *limits])
    async with HttpServer(settings) as server:
        task = asyncio.create_task(server.serve(create_app(routers, settings, metrics)))
        try:
            yield f"http://{server.endpoint}"
        finally:
            server.stop_requested.set()
            async with asyncio.timeout(20):
                await task


async def figure(url: str, name: str, **labels: str) -> float:
    families = text_string_to_metric_families((await ask(f"{url}/metrics")).body.decode())
    samples = (sample for family in families for sample in family.samples if sample.name == f"pdserve_gateway_{name}")
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.gateway.answer._GRACE", 0.3)


@contextlib.contextmanager
def unread(url: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A connection with small buffers on which a request was sent; nobody reads the answer."""
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((host, int(port)))
        data = json.dumps(body).encode()
        head = f"POST {PATH} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
        sock.sendall(f"{head}\r\n\r\n".encode() + data)
        yield sock


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("limits", [pytest.param((0.5, 60.0), id="deadline"), pytest.param((60.0, 0.5), id="unread")])
def test_a_client_that_does_not_read_is_left(
    loop: Loop, limits: tuple[float, float], caplog: pytest.LogCaptureFixture
) -> None:
    """At the deadline, or after it read nothing for so long, the work ends, nothing counts as in flight, and the
    connection is closed with what was unread: the server, which waits for connections, stops at once."""

    async def main() -> bytes:
        routers = Script("x" * 65536)
        async with serving(routers, GatewayMetrics(), *limits) as url:
            with unread(url, {**BODY, "stream": True}) as sock:
                async with asyncio.timeout(20):
                    await routers.closed.wait()
                    while await figure(url, "requests_in_flight", route=PATH):
                        pass
                # 64 KiB each. What nobody reads is not asked for: only the system's buffers fill up.
                assert 0 < routers.told < 500
                assert await figure(url, "stream_errors_total", route=PATH) == 1
                assert await figure(url, "disconnects_total", route=PATH) == 0
                assert await figure(url, "requests_total", route=PATH, status="200") == 1
                await asyncio.sleep(0.1)
                kept = sock.dup()
        # The server is gone, and the client reads only now.
        with kept:
            kept.settimeout(20)
            found = b""
            with contextlib.suppress(ConnectionResetError):
                while data := kept.recv(1 << 16):
                    found += data
            return found

    with asyncio.Runner(loop_factory=loop) as runner:
        answer = runner.run(main())
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"[DONE]" not in answer and not answer.endswith(b"0\r\n\r\n")
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_router_that_says_nothing_is_a_504(stream: bool) -> None:
    """The session's own deadline did not come: the gateway's does."""
    routers = Script()
    async with serving(routers, GatewayMetrics(), 0.2) as url:
        reply = await ask(f"{url}{PATH}", {**BODY, "stream": stream})
        assert (reply.status, reply.error["code"], reply.error["type"]) == (504, "timeout", "server_error")
        assert reply.error["message"] == "the answer was not here after 0.2 s"
        assert routers.closed.is_set()
        assert await figure(url, "requests_total", route=PATH, status="504") == 1
        assert await figure(url, "requests_in_flight", route=PATH) == 0
        assert await figure(url, "stream_errors_total", route=PATH) == 0


async def test_a_bug_is_a_500_with_an_id_that_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    bug = RuntimeError("secret of the inside")
    async with serving(Script(bug=bug), GatewayMetrics()) as url:
        reply = await ask(f"{url}/v1/models", headers={"x-request-id": "mine"})
        assert (reply.status, reply.error["code"]) == (500, "internal_error")
        assert reply.headers["x-request-id"] == "mine"
        assert b"secret" not in reply.body
        assert await figure(url, "requests_total", route="/v1/models", status="500") == 1
        assert await figure(url, "requests_total", route="/v1/models") == 1
        assert await figure(url, "requests_in_flight", route="/v1/models") == 0
        named = await ask(f"{url}/v1/models")
        assert named.headers["x-request-id"].startswith("req-")
    logged = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert logged == [bug, bug]


async def test_a_request_that_nobody_knows_is_not_a_model() -> None:
    async with serving(Script(), GatewayMetrics()) as url:
        reply = await ask(f"{url}/pdserve/v1/trace/gone")
    assert reply.status == 404
    assert (reply.error["param"], reply.error["code"]) == ("request_id", "request_not_found")


async def test_a_bias_for_no_token_is_a_400() -> None:
    routers = Script()
    async with serving(routers, GatewayMetrics()) as url:
        reply = await ask(f"{url}{PATH}", {**BODY, "logit_bias": {"9999999999": 1}})
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, "logit_bias", "invalid_value")
    assert routers.asked == []


@pytest.mark.parametrize(
    ("parent", "kept"), [(PARENT, True), (LATER.ljust(256, "x"), True), (LATER.ljust(257, "x"), False)]
)
async def test_a_long_traceparent_is_ignored(parent: str, kept: bool) -> None:
    routers = Script()
    async with serving(routers, GatewayMetrics(), 0.1) as url:
        assert (await ask(f"{url}{PATH}", BODY, {**JSON, "traceparent": parent})).status == 504
    [asked] = routers.asked
    assert (PARENT[3:35] in asked["traceparent"]) is kept
