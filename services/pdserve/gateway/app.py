"""The gateway as an ASGI application: OpenAI's routes, those around them, and the console."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from pdserve.core.errors import PdserveError
from pdserve.gateway.call import Calls
from pdserve.gateway.completions import Completions
from pdserve.gateway.config import GatewaySettings
from pdserve.gateway.console import console_routes
from pdserve.gateway.errors import ApiError, error_response, from_pdserve, internal
from pdserve.gateway.facts import Facts
from pdserve.gateway.metrics import GatewayMetrics
from pdserve.gateway.routers import Routers

log = structlog.get_logger(__name__)

_OTHER = "other"
_PATH = 200  # characters of a path that are looked at and told
_RENAMES = {"text": "prompt", "ids": "tokens", "chat": "messages"}


def create_app(
    routers: Routers, settings: GatewaySettings, metrics: GatewayMetrics, leaving: Callable[[], bool] = lambda: False
) -> Starlette:
    """The application. `routers` must be open while it serves; `leaving` says whether it was told to stop."""
    completions = Completions(routers, settings)
    facts = Facts(routers, settings, metrics, leaving)
    routes = [
        Route("/v1/chat/completions", completions.chat, methods=["POST"]),
        Route("/v1/completions", completions.text, methods=["POST"]),
        Route("/v1/models", facts.models),
        Route("/v1/models/{name:path}", facts.model),
        Route("/tokenize", facts.tokenize, methods=["POST"]),
        Route("/detokenize", facts.detokenize, methods=["POST"]),
        Route("/health", facts.health),
        Route("/version", facts.version),
        Route("/metrics", facts.metrics),
        *console_routes(routers),
    ]

    def route_of(scope: Scope) -> str:
        """The path as it is declared: nobody's URL makes a new series of metrics."""
        return next((route.path for route in routes if route.matches(scope)[0] is not Match.NONE), _OTHER)

    return Starlette(
        routes=routes,
        middleware=[Middleware(Calls, metrics=metrics, route_of=route_of)],
        exception_handlers={
            ApiError: _api_error,
            PdserveError: _pdserve_error,
            HTTPException: _http_error,
            Exception: _broken,
        },
    )


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    log.info("request_refused", status=error.status, param=error.param, code=error.code)
    return error_response(error)


async def _pdserve_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PdserveError)
    return await _api_error(request, from_pdserve(error, _RENAMES))


async def _http_error(request: Request, error: Exception) -> Response:
    """No such route, or not with this method."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:_PATH]
    allowed = (error.headers or {}).get("Allow")
    hint = f"; it takes {allowed}" if allowed else near_path(path, [route.path for route in request.app.routes])
    what = f"{request.method} {path}: {error.detail}{hint}"
    response = error_response(ApiError(error.status_code, what, code=error.detail.lower().replace(" ", "_")))
    response.headers.update(error.headers or {})
    return response


def near_path(path: str, known: Sequence[str]) -> str:
    """The known path that is meant where `path` is none: a client's base URL has /v1 too often, or not at all."""
    candidates = [f"/v1{path}", path.removeprefix("/v1"), *get_close_matches(path, known, n=1, cutoff=0.8)]
    found = next((candidate for candidate in candidates if candidate in known and candidate != "/"), None)
    return f"; did you mean {found}?" if found else ""


async def _broken(request: Request, error: Exception) -> Response:
    """A bug outside of `Calls`, which answers those inside. Starlette raises it again, and uvicorn logs it."""
    return error_response(internal())
