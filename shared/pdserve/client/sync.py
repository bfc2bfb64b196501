"""The blocking client, for programs without an event loop. It stands on grpc's own blocking calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc

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
from pdserve.rpc.api_keys import bearer
from pdserve.rpc.channel import connect_blocking
from pdserve.rpc.errors import RpcError
from pdserve.rpc.tls import Tls
from pdserve.v1 import inference_pb2_grpc


class _Cancellable(Protocol):
    def cancel(self) -> object: ...


Call = TypeVar("Call", bound=_Cancellable)


class _Place:
    """Where a request is: in a call, or (None) between two. Read and written under the client's lock."""

    def __init__(self) -> None:
        self.cancelled = False
        self.call: _Cancellable | None = None


class SyncEventStream(Iterator[Event]):
    """The events of one request, which begins with the first of them that is asked for. One thread iterates it.

    Leaving a `with` block around it cancels the request on the server, and so does dropping it.
    """

    def __init__(self, events: Generator[Event], cancel: Callable[[], None]) -> None:
        self._events = events
        self._cancel = cancel

    def __next__(self) -> Event:
        return next(self._events)

    def close(self) -> None:
        """Cancel the request; nothing happens where it has ended. Any thread may: one that waits for an event then gets
        RpcError with CANCELLED."""
        self._cancel()
        with suppress(ValueError):  # it runs in another thread, where the cancel ends it
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SyncClient:
    """A connection to a router, or to several that stand for each other, that any number of threads may share. Use it
    with `with`, or `close` it.

    Methods, options and errors are those of `Client`.
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
        """As `Client`. `on_retry` is called by the thread whose call it is."""
        self._settings = CallSettings(timeout, retry, on_retry, wait_for_ready)
        self._settings.check(targets := targets_of(target))
        self._key, self._metadata = api_key, bearer(api_key)
        self._channels = [connect_blocking(one, tls) for one in targets]
        self._stubs = Rotation([inference_pb2_grpc.InferenceServiceStub(channel) for channel in self._channels])
        self._changed = threading.Condition()  # guards what follows, and every _Place
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Calls that still run, in whatever thread, are cancelled, here and on the server."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for channel in self._channels:
            channel.close()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> SyncEventStream:
        """Run one request and stream its events, as `Client.generate` does."""
        place = _Place()
        return SyncEventStream(
            self._events(Exchange(prompt, {"api_key": self._key, **options}), place), partial(self._cancel, place)
        )

    def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Run one request to its end; options as in `generate`."""
        answer = Collector()
        with self.generate(prompt, **options) as events:
            for event in events:
                answer.add(event)
        return answer.completion()

    def models(self, timeout: float = CALL_TIMEOUT) -> list[Model]:
        """The models that can be asked for now."""
        return self._ask(queries.models(), timeout)

    def fleet(self, timeout: float = CALL_TIMEOUT) -> list[FleetWorker]:
        """The router's view of its workers."""
        return self._ask(queries.fleet(), timeout)

    def stats(self, timeout: float = CALL_TIMEOUT) -> Stats:
        """What the router measured in the last minute: latencies, rates, goodput, cache hits."""
        return self._ask(queries.stats(), timeout)

    def traces(self, limit: int = 20, timeout: float = CALL_TIMEOUT) -> list[RequestSummary]:
        """The router's most recent requests, the newest first."""
        return self._ask(queries.traces(limit), timeout)

    def trace(self, request_id: str, timeout: float = CALL_TIMEOUT) -> Trace:
        """Where the time of a recent request went, on all services. Raises UnknownRequest."""
        return self._ask(queries.trace(request_id), timeout)

    def explain(self, request_id: str, timeout: float = CALL_TIMEOUT) -> Explanation:
        """Why a recent request was sent where it was, and what it waited for. Raises UnknownRequest."""
        return self._ask(queries.explain(request_id), timeout)

    def tokenize(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        token_bytes: bool = False,
        timeout: float = CALL_TIMEOUT,
    ) -> Tokenization:
        """The tokens that a text or a conversation is; `add_special_tokens` None: as `generate` does it."""
        return self._ask(queries.tokenize(prompt, model, add_special_tokens, token_bytes), timeout)

    def detokenize(
        self,
        ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = False,
        timeout: float = CALL_TIMEOUT,
    ) -> str:
        """The text of token ids."""
        return self._ask(queries.detokenize(ids, model, skip_special_tokens), timeout)

    def _events(self, exchange: Exchange, place: _Place) -> Generator[Event]:
        settings, clock = self._settings, time.monotonic
        timeout = settings.timeout if exchange.timeout is None else exchange.timeout
        attempts = Attempts(settings, "Generate", timeout, clock(), self._stubs)
        while True:
            begin = partial(
                attempts.target.Generate,
                exchange.request,
                timeout=attempts.remaining(clock()),
                metadata=exchange.metadata,
                wait_for_ready=settings.wait_for_ready,
            )
            call = self._begin(place, begin)
            try:
                for response in call:
                    event = exchange.take(response)
                    if event is not None:
                        yield event
                exchange.end()
                return
            except grpc.RpcError as error:
                if exchange.finished:
                    return  # only the stream's own end is missing
                delay = attempts.failed(error, clock(), again=exchange.repeatable, progress=exchange.shown)
            finally:
                call.cancel()
            self._wait(place, delay)

    def _ask(self, query: Query[Answer], timeout: float) -> Answer:
        settings, clock, place = self._settings, time.monotonic, _Place()
        attempts = Attempts(settings, query.method, timeout, clock(), self._stubs)
        while True:
            remaining = attempts.remaining(clock())
            method = getattr(attempts.target, query.method)
            begin = partial(
                method.future,
                query.request,
                timeout=remaining,
                wait_for_ready=settings.wait_for_ready,
                metadata=self._metadata,
            )
            call = self._begin(place, begin)
            try:
                return query.read(call.result())
            except grpc.RpcError as error:
                delay = attempts.failed(error, clock())
            finally:
                call.cancel()
            self._wait(place, delay)

    def _begin(self, place: _Place, begin: Callable[[], Call]) -> Call:
        """Begin a call, unless it was cancelled before. `begin` must not block."""
        with self._changed:
            if self._closed or place.cancelled:
                what = "this client is closed" if self._closed else "this request was cancelled"
                raise RpcError(grpc.StatusCode.CANCELLED, what)
            place.call = call = begin()
        return call

    def _wait(self, place: _Place, seconds: float) -> None:
        """Until the next try, or until it is called off."""
        with self._changed:
            place.call = None
            self._changed.wait_for(lambda: self._closed or place.cancelled, seconds)

    def _cancel(self, place: _Place) -> None:
        with self._changed:
            place.cancelled = True
            self._changed.notify_all()
            call = place.call
        if call is not None:
            call.cancel()
