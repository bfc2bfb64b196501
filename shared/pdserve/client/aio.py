"""The client for asyncio."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self, Unpack

import grpc
import grpc.aio

from pdserve.client import queries
from pdserve.client.attempts import CALL_TIMEOUT, Attempts, CallSettings
from pdserve.client.decisions import Explanation
from pdserve.client.events import Completion, Event
from pdserve.client.exchange import Collector, Exchange
from pdserve.client.fleet import FleetWorker, Model
from pdserve.client.options import GenerateOptions, Prompt
from pdserve.client.queries import Answer, Query
from pdserve.client.retry import DEFAULT_RETRIES, Retry, RetryPolicy
from pdserve.client.stats import Stats
from pdserve.client.targets import Rotation, targets_of
from pdserve.client.tokens import Tokenization
from pdserve.client.traces import RequestSummary, Trace
from pdserve.rpc.access import Access
from pdserve.rpc.api_keys import bearer
from pdserve.rpc.channel import connect
from pdserve.rpc.errors import RpcError
from pdserve.rpc.tls import Tls
from pdserve.v1 import inference_pb2_grpc


class EventStream(AsyncIterator[Event]):
    """The events of one request, which begins with the first of them that is asked for.

    Leaving an `async with` block around it cancels the request on the server, and so does dropping it.
    """

    def __init__(self, events: AsyncGenerator[Event]) -> None:
        self._events = events

    def __anext__(self) -> Awaitable[Event]:
        return self._events.__anext__()

    async def aclose(self) -> None:
        """Cancel the request; nothing happens where it has ended."""
        await self._events.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class Client:
    """A connection to a router, or to several that stand for each other. Use it with `async with`, or `close` it.

    Every method raises PdserveError (pdserve.core.errors; pdserve.rpc.errors.RpcError for what has no type there).
    """

    def __init__(
        self,
        target: str | Sequence[str],
        *,
        timeout: float | None = None,
        retry: RetryPolicy = DEFAULT_RETRIES,
        on_retry: Callable[[Retry], None] | None = None,
        wait_for_ready: bool = False,
        api_key: str = "",
        tls: Tls | None = None,
    ) -> None:
        """`target` is the router's host:port; it is connected to by the first call. Of several, one is asked until
        it is lost; then it is the next one's turn. One that is full is passed over for the moment.

        `timeout` is the deadline of each answer that names none, in seconds. `on_retry` is told of each retry before
        its wait. A router that cannot be reached fails a try at once, and is tried again as `retry` says;
        `wait_for_ready` waits for it as long as the deadline allows, without using up retries; ValueError with several.

        `api_key` is shown with each call, where the router asks for one. InvalidRequest for a text that cannot be one.
        `tls` says whom to trust, and what to show a router that asks for certificates; None: no TLS. ConfigError for
        files that cannot be read.
        """
        self._settings = CallSettings(timeout, retry, on_retry, wait_for_ready)
        self._settings.check(targets := targets_of(target))
        self._key, self._metadata = api_key, bearer(api_key)
        self._channels = [connect(one, Access(tls=tls)) for one in targets]
        self._stubs = Rotation([inference_pb2_grpc.InferenceServiceStub(channel) for channel in self._channels])
        self._closed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. Calls that still run are cancelled, here and on the server."""
        self._closed.set()
        await asyncio.gather(*(channel.close() for channel in self._channels))

    def with_api_key(self, api_key: str) -> Self:
        """This client for somebody else's calls, over the same connections: closing either closes both."""
        other = copy.copy(self)
        other._key, other._metadata = api_key, bearer(api_key)
        return other

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> EventStream:
        """Run one request and stream PromptInfo, then Outputs, then Finish.

        `prompt` is text, token ids, or chat messages; TypeError for another, and for an option that does not exist.
        An answer that breaks off is resumed behind the last token that was shown, where the failure may be retried.
        """
        return EventStream(self._events(Exchange(prompt, {"api_key": self._key, **options})))

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Run one request to its end; options as in `generate`."""
        answer = Collector()
        async with self.generate(prompt, **options) as events:
            async for event in events:
                answer.add(event)
        return answer.completion()

    async def models(self, timeout: float = CALL_TIMEOUT) -> list[Model]:
        """The models that can be asked for now."""
        return await self._ask(queries.models(), timeout)

    async def fleet(self, timeout: float = CALL_TIMEOUT) -> list[FleetWorker]:
        """The router's view of its workers."""
        return await self._ask(queries.fleet(), timeout)

    async def stats(self, timeout: float = CALL_TIMEOUT) -> Stats:
        """What the router measured in the last minute: latencies, rates, goodput, cache hits."""
        return await self._ask(queries.stats(), timeout)

    async def traces(self, limit: int = 20, timeout: float = CALL_TIMEOUT) -> list[RequestSummary]:
        """The router's most recent requests, the newest first."""
        return await self._ask(queries.traces(limit), timeout)

    async def trace(self, request_id: str, timeout: float = CALL_TIMEOUT) -> Trace:
        """Where the time of a recent request went, on all services. Raises UnknownRequest."""
        return await self._ask(queries.trace(request_id), timeout)

    async def explain(self, request_id: str, timeout: float = CALL_TIMEOUT) -> Explanation:
        """Why a recent request was sent where it was, and what it waited for. Raises UnknownRequest."""
        return await self._ask(queries.explain(request_id), timeout)

    async def tokenize(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        token_bytes: bool = False,
        timeout: float = CALL_TIMEOUT,
    ) -> Tokenization:
        """The tokens that a text or a conversation is; `add_special_tokens` None: as `generate` does it."""
        return await self._ask(queries.tokenize(prompt, model, add_special_tokens, token_bytes), timeout)

    async def detokenize(
        self,
        ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = False,
        timeout: float = CALL_TIMEOUT,
    ) -> str:
        """The text of token ids."""
        return await self._ask(queries.detokenize(ids, model, skip_special_tokens), timeout)

    async def _events(self, exchange: Exchange) -> AsyncGenerator[Event]:
        clock = asyncio.get_running_loop().time
        timeout = self._settings.timeout if exchange.timeout is None else exchange.timeout
        attempts = Attempts(self._settings, "Generate", timeout, clock(), self._stubs)
        while True:
            self._require_open()
            call = attempts.target.Generate(
                exchange.request,
                timeout=attempts.remaining(clock()),
                metadata=exchange.metadata,
                wait_for_ready=self._settings.wait_for_ready,
            )
            try:
                async for response in call:
                    event = exchange.take(response)
                    if event is not None:
                        yield event
                exchange.end()
                return
            except grpc.aio.AioRpcError as error:
                if exchange.finished:
                    return  # only the stream's own end is missing
                delay = attempts.failed(error, clock(), again=exchange.repeatable, progress=exchange.shown)
            except asyncio.CancelledError:
                if not _cancelling():
                    self._require_open()
                raise
            finally:
                call.cancel()  # grpc leaves a call that nobody reads running
            await self._wait(delay)

    async def _ask(self, query: Query[Answer], timeout: float) -> Answer:
        clock = asyncio.get_running_loop().time
        attempts = Attempts(self._settings, query.method, timeout, clock(), self._stubs)
        while True:
            self._require_open()
            remaining = attempts.remaining(clock())
            method = getattr(attempts.target, query.method)
            call = method(
                query.request, timeout=remaining, wait_for_ready=self._settings.wait_for_ready, metadata=self._metadata
            )
            try:
                return query.read(await call)
            except grpc.aio.AioRpcError as error:
                delay = attempts.failed(error, clock())
            except asyncio.CancelledError:
                if not _cancelling():
                    self._require_open()
                raise
            finally:
                call.cancel()
            await self._wait(delay)

    async def _wait(self, seconds: float) -> None:
        """Until the next try, or until the client is closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()

    def _require_open(self) -> None:
        if self._closed.is_set():
            raise RpcError(grpc.StatusCode.CANCELLED, "this client is closed") from None


def _cancelling() -> bool:
    """Whether somebody wants this task to end. Else a CancelledError is how grpc tells of a call that was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
