"""What can be asked beside answers: models, health, version, metrics, and the models' tokenizers."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from pdserve.client import Client, Model
from pdserve.gateway.call import call_of
from pdserve.gateway.config import GatewaySettings
from pdserve.gateway.errors import ApiError, invalid
from pdserve.gateway.logprobs import token_text
from pdserve.gateway.metrics import GatewayMetrics
from pdserve.gateway.parse import parse, read_body
from pdserve.gateway.routers import Routers
from pdserve.gateway.schema import DetokenizeBody, TokenizeBody
from pdserve.gateway.translate import conversation
from pdserve.rpc.versions import software_version


class Facts:
    """Endpoints. `leaving` says whether this gateway was told to stop."""

    def __init__(
        self, routers: Routers, settings: GatewaySettings, metrics: GatewayMetrics, leaving: Callable[[], bool]
    ) -> None:
        self._routers, self._settings, self._metrics, self._leaving = routers, settings, metrics, leaving
        self._since = int(time.time())

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._card(model) for model in await self._served(request)]})

    async def model(self, request: Request) -> Response:
        """Ids may have slashes in them."""
        name = request.path_params["name"]
        for model in await self._served(request):
            if model.name == name:
                return _json(self._card(model))
        raise ApiError(404, f"no model {name[:100]!r} here", param="model", code="model_not_found")

    async def health(self, request: Request) -> Response:
        """200 while a router serves; asked at this moment."""
        if self._leaving():
            return _json({"status": "draining"}, 503)
        serving = await self._routers.check()
        return _json({"status": "ok"} if serving else {"status": "no router serves"}, 200 if serving else 503)

    async def version(self, request: Request) -> Response:
        return _json({"version": software_version()})

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def tokenize(self, request: Request) -> Response:
        body = parse(TokenizeBody, await self._body(request))
        prompt = body.prompt if body.messages is None else conversation(body.messages)
        if prompt is None or (body.prompt is not None and body.messages is not None):
            raise invalid("prompt", "exactly one of prompt and messages must be set")
        with self._client(request) as client:
            found = await client.tokenize(
                prompt,
                model=body.model or "",
                add_special_tokens=body.add_special_tokens,
                token_bytes=bool(body.return_token_strs),
            )
        strings = [token_text(data) for data in found.token_bytes] if body.return_token_strs else None
        return _json(
            {
                "count": len(found.ids),
                "max_model_len": found.max_model_len,
                "tokens": found.ids,
                "token_strs": strings,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        body = parse(DetokenizeBody, await self._body(request))
        with self._client(request) as client:
            return _json({"prompt": await client.detokenize(body.tokens, model=body.model or "")})

    async def _served(self, request: Request) -> list[Model]:
        with self._client(request) as client:
            return await client.models()

    def _client(self, request: Request) -> AbstractContextManager[Client]:
        return self._routers.pick(call_of(request.scope).api_key)

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self._settings.max_body_size, self._settings.body_seconds)

    def _card(self, model: Model) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._since,
            "owned_by": "pdserve",
            "root": model.name,
            "parent": None,
            "max_model_len": model.max_model_len,
        }


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
