"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pdserve.gateway.answer import Answer
from pdserve.gateway.config import GatewaySettings
from pdserve.gateway.parse import parse, read_body
from pdserve.gateway.routers import Routers
from pdserve.gateway.schema import ChatBody, CompletionBody
from pdserve.gateway.translate import Job, chat_job, completion_job


class Completions:
    """Endpoints: a body becomes a job, a job an Answer."""

    def __init__(self, routers: Routers, settings: GatewaySettings) -> None:
        self._routers, self._settings = routers, settings

    async def chat(self, request: Request) -> Response:
        return self._answer(chat_job(parse(ChatBody, await self._body(request))))

    async def text(self, request: Request) -> Response:
        body = parse(CompletionBody, await self._body(request))
        return self._answer(completion_job(body, self._settings.max_prompts))

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self._settings.max_body_size, self._settings.body_seconds)

    def _answer(self, job: Job) -> Response:
        return Answer(job, self._routers, self._settings.max_request_seconds, self._settings.unread_seconds)
