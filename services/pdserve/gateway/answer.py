"""The answer to one completion request: streamed or whole, and cancelled when its client goes away.

Nothing is sent before the first token is here. Until then a refusal still has an HTTP status and a Retry-After, which
clients act upon; later it is the stream's last event. A client that does not read is left: after a while, and at the
latest when its time is over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager, suppress

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve.client import Event, Finish, GenerateOptions, PromptInfo, Usage
from pdserve.core.errors import PdserveError
from pdserve.gateway.call import Call, call_of
from pdserve.gateway.chunks import DONE, Chunks, Head, Whole, event
from pdserve.gateway.disconnect import hang_up, unless_disconnected
from pdserve.gateway.errors import ApiError, error_response, from_pdserve, internal, loggable
from pdserve.gateway.fan import merge
from pdserve.gateway.routers import Routers
from pdserve.gateway.translate import Job
from pdserve.rpc.errors import DeadlineExceeded

log = structlog.get_logger(__name__)

_GRACE = 5.0  # seconds for a router to tell that the time is over, and for the client to read that

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold tokens back
]


class _Unread(Exception):
    """The client took nothing of what was sent for too long."""


class Answer(Response):
    """Does the work for `job` when it is sent. `timeout`, in seconds, is the deadline of each prompt's answer, `unread`
    how long what was sent may wait for its client to take it."""

    def __init__(self, job: Job, routers: Routers, timeout: float, unread: float) -> None:
        self._job, self._routers, self._timeout, self._unread_for = job, routers, timeout, unread
        self._started = False
        super().__init__()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = call_of(scope)
        try:
            async with asyncio.timeout(self._timeout + _GRACE):
                if not await unless_disconnected(receive, self._answer(call, scope, receive, send)):
                    call.metrics.disconnected(call.route)
                    log.info("client_gone", route=call.route)
        except TimeoutError:
            await self._late(call, scope, receive, send)
        except _Unread:
            log.info("answer_unread", route=call.route, seconds=self._unread_for)
            if self._started:
                call.metrics.stream_failed(call.route)
            await hang_up(scope)

    async def _answer(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await (self._stream(call, send) if self._job.stream else self._whole(call, send))
        except (ApiError, PdserveError) as raised:
            error = raised if isinstance(raised, ApiError) else from_pdserve(raised, self._job.renames)
            log.info("request_failed", route=call.route, **loggable(error))
            await self._fail(error, call, scope, receive, send)
        except _Unread:
            raise
        except Exception as raised:
            log.error("request_broken", route=call.route, error=repr(raised), exc_info=raised)
            await self._fail(internal(), call, scope, receive, send)

    async def _fail(self, error: ApiError, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._started:
            await error_response(error)(scope, receive, send)
            return
        call.metrics.stream_failed(call.route)
        # Without [DONE]: nobody shall take this for a complete answer.
        await self._send(send, event(error.body()), more=False)

    async def _late(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        """The work was cancelled. Where nothing was sent the client still gets a status, if it reads."""
        log.info("answer_late", route=call.route, answered=call.answered)
        if not call.answered:
            error = from_pdserve(DeadlineExceeded(f"the answer was not here after {self._timeout:.3g} s"))
            with suppress(TimeoutError):
                async with asyncio.timeout(_GRACE):
                    await error_response(error)(scope, receive, send)
                return
        if self._started:
            call.metrics.stream_failed(call.route)
        await hang_up(scope)

    async def _stream(self, call: Call, send: Send) -> None:
        job = self._job
        chunks: Chunks | None = None
        usages: list[Usage] = []
        begun: set[int] = set()
        async with self._events(call) as events:
            async for index, part in events:
                if isinstance(part, PromptInfo):
                    chunks = chunks or self._chunks(call, part)
                    continue
                assert chunks is not None, "PromptInfo comes first"
                data = b""
                if index not in begun:
                    begun.add(index)
                    call.note_first_token()
                    data = chunks.first(index)
                if isinstance(part, Finish):
                    usages.append(part.usage)
                    data += chunks.finish(index, part)
                else:
                    data += chunks.output(index, part)
                if data:
                    await self._send(send, data)
        assert chunks is not None and len(usages) == len(job.prompts), "every answer ends with a Finish"
        await self._send(send, chunks.usage(usages) + DONE, more=False)

    async def _whole(self, call: Call, send: Send) -> None:
        job = self._job
        whole, head = Whole(len(job.prompts), logprobs=job.logprobs, token_ids=job.token_ids), None
        async with self._events(call) as events:
            async for index, part in events:
                if isinstance(part, PromptInfo):
                    head = head or _head(job, call, part)
                else:
                    call.note_first_token()
                    whole.add(index, part)
        assert head is not None, "PromptInfo comes first"
        body = whole.json(head, job.stop_token_ids)
        await self._read(_send_whole(send, body))

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        if not self._started:
            self._started = True
            await self._read(send({"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)}))
        await self._read(send({"type": "http.response.body", "body": data, "more_body": more}))

    async def _read(self, sending: Awaitable[None]) -> None:
        """Wait until the client has taken most of it. Raises _Unread."""
        try:
            async with asyncio.timeout(self._unread_for):
                await sending
        except TimeoutError:
            raise _Unread from None

    @asynccontextmanager
    async def _events(self, call: Call) -> AsyncIterator[AsyncGenerator[tuple[int, Event]]]:
        """Ask routers for every prompt at once; leaving cancels what still runs."""
        job = self._job
        streams = []
        for number, prompt in enumerate(job.prompts):
            options: GenerateOptions = {
                **job.options,
                "request_id": f"{call.id}-{number}" if len(job.prompts) > 1 else call.id,
                "timeout": self._timeout,
                "traceparent": call.traceparent,
                "tenant": call.tenant,
                "api_key": call.api_key,
                "token_bytes": job.logprobs,
            }
            streams.append(self._routers.generate(prompt, **options))
        async with aclosing(merge(streams)) as events:
            yield events

    def _chunks(self, call: Call, info: PromptInfo) -> Chunks:
        job = self._job
        return Chunks(
            _head(job, call, info),
            len(job.prompts),
            logprobs=job.logprobs,
            include_usage=job.include_usage,
            named=job.stop_token_ids,
            token_ids=job.token_ids,
        )


def _head(job: Job, call: Call, info: PromptInfo) -> Head:
    return Head(job.chat, call.id, int(time.time()), info.model)


async def _send_whole(send: Send, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
