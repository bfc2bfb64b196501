"""Every HTTP request, from its head to the end of its answer: its id, its span, what is counted, and its errors."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from opentelemetry.trace import INVALID_SPAN
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.gateway.errors import error_response, internal, invalid
from pdserve.gateway.metrics import GatewayMetrics
from pdserve.rpc.api_keys import shown_key
from pdserve.rpc.garbage import Garbage
from pdserve.rpc.tenant import TENANT
from pdserve.telemetry import names
from pdserve.telemetry.logs import log_request
from pdserve.telemetry.tracing import TRACEPARENT, Span, bounded_traceparent, start_span, traceparent_of

log = structlog.get_logger(__name__)

_ID = re.compile(r"^[ -~]{1,120}$")  # the router takes 128; several prompts get a number behind it
_CALL = "pdserve.call"
GONE = 499


@dataclass(slots=True, repr=False)
class Call:
    """One request. `id` is the caller's x-request-id or ours, and stands in answer, logs and traces alike."""

    id: str
    route: str
    started: float
    metrics: GatewayMetrics
    traceparent: str = ""
    tenant: str = ""  # the caller's x-tenant-id, for the router to check
    api_key: str = ""  # what the caller shows, for the router to judge
    status: int = GONE
    answered: bool = False  # the head of the answer was sent
    first_token: bool = False

    def note_first_token(self) -> None:
        """Call at the first token of the answer; later calls do nothing."""
        if not self.first_token:
            self.first_token = True
            self.metrics.first_token(self.route, time.monotonic() - self.started)


def call_of(scope: Scope) -> Call:
    call: Call = scope[_CALL]
    return call


class Calls:
    """Middleware around all routes. `route_of` names a request's route after it was matched."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, route_of: Callable[[Scope], str]) -> None:
        self._app, self._metrics, self._route_of = app, metrics, route_of
        self._garbage = Garbage()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        route = self._route_of(scope)
        call = Call(given or f"req-{secrets.token_hex(12)}", route, time.monotonic(), self._metrics)
        call.tenant, call.api_key = headers.get(TENANT, ""), shown_key(headers)
        scope[_CALL] = call
        parent = bounded_traceparent(headers.get(TRACEPARENT, ""))
        span: Span = INVALID_SPAN
        if scope["method"] == "POST":  # what pages and probes ask each second would push requests out of the ring
            span = start_span(f"POST {route}", parent, {names.REQUEST_ID: call.id[:128]})
        call.traceparent = traceparent_of(span) or parent
        self._metrics.begun(route)
        taken = 0

        async def take() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            return message

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status, call.answered = message["status"], True
                # A new list: the message's may be a response's own, which is sent more than once.
                message = {**message, "headers": [*message["headers"], (b"x-request-id", call.id.encode("latin-1"))]}
            await send(message)

        try:
            if given and not _ID.match(given):
                call.id = f"req-{secrets.token_hex(12)}"
                await error_response(invalid("x-request-id", "must be 1 to 120 printable ASCII characters"))(
                    scope, receive, tell
                )
                return
            with log_request(call.id):
                await self._app(scope, take, tell)
        except Exception:
            # Starlette's own answer to a bug goes out beside `tell`: it would have no id, and be counted as gone.
            if not call.answered:
                await error_response(internal())(scope, receive, tell)
            raise  # uvicorn logs it with its traceback
        finally:
            self._garbage.left(taken)
            self._metrics.ended(route, call.status, time.monotonic() - call.started)
            span.set_attribute("http.response.status_code", call.status)
            span.end()
