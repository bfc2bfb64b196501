"""What the page at the gateway's root lives on, as JSON: the fleet, requests and their traces, as routers see them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.client import Client
from pdserve.core.errors import PdserveError
from pdserve.gateway.call import call_of
from pdserve.gateway.console_view import describe_request, describe_trace
from pdserve.gateway.page_files import PageFiles
from pdserve.gateway.routers import Routers
from pdserve.telemetry.tracing import recent_spans

RECENT = 20
SERVICE = "gateway"
Answer = TypeVar("Answer")


def console_routes(routers: Routers) -> list[Route]:
    """The page, its files, and what it asks for. `routers` must be open while they serve."""
    files, console = PageFiles(), Console(routers)
    return [
        Route("/", files.index),
        Route("/page/{file}", files.file),
        Route("/pdserve/v1/fleet", console.fleet),
        Route("/pdserve/v1/stats", console.stats),
        Route("/pdserve/v1/traces", console.traces),
        Route("/pdserve/v1/trace/{request_id:path}", console.trace),
    ]


class Console:
    """Endpoints. The PdserveErrors that they raise are the application's to tell."""

    def __init__(self, routers: Routers) -> None:
        self._routers = routers

    async def fleet(self, request: Request) -> Response:
        """{"workers": [...]}, each as pdserve.client.FleetWorker has it; one router's view, which all share."""
        with self._routers.pick(call_of(request.scope).api_key) as client:
            return _json({"workers": [asdict(worker) for worker in await client.fleet()]})

    async def stats(self, request: Request) -> Response:
        """{"routers": [...]}, each as pdserve.client.Stats has it: a router knows only its own requests."""
        return _json(
            {"routers": [asdict(stats) for stats in await self._ask_all(request, lambda client: client.stats())]}
        )

    async def traces(self, request: Request) -> Response:
        """{"requests": [...]}: the most recent ones, the newest first."""
        lists = await self._ask_all(request, lambda client: client.traces(RECENT))
        requests = sorted((one for found in lists for one in found), key=lambda one: -one.arrived_ns)
        return _json({"requests": [describe_request(one) for one in requests[:RECENT]]})

    async def trace(self, request: Request) -> Response:
        """One request's waterfall, with this gateway's own part; 404 where no router remembers it."""
        request_id = request.path_params["request_id"]
        [trace, *_] = await self._ask_all(request, lambda client: client.trace(request_id))
        own = recent_spans(trace.request.trace_id)
        return _json(describe_trace(trace.with_spans(SERVICE, own[0]) if own else trace))

    async def _ask_all(self, request: Request, ask: Callable[[Client], Awaitable[Answer]]) -> list[Answer]:
        """The answers of those routers that have one. Raises the first router's error where none has."""
        found = await asyncio.gather(
            *map(ask, self._routers.clients(call_of(request.scope).api_key)), return_exceptions=True
        )
        errors = [answer for answer in found if isinstance(answer, BaseException)]
        for error in errors:
            if not isinstance(error, PdserveError):
                raise error
        if len(errors) == len(found):
            raise errors[0]
        return [answer for answer in found if not isinstance(answer, BaseException)]


def _json(answer: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(answer), headers={"cache-control": "no-store"}, media_type="application/json")
