"""gRPC between simulated processes: the generated stubs and servicers run over it as over grpc.aio.

A message is bytes on its way, in order within its stream, after a latency that the seed draws. A process that is
stopped takes its messages later, one that was killed takes none, and who was connected to it hears of a reset.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Self

import grpc
import grpc.aio

from tests.sim.loop import Process, VirtualLoop

RESET = "connection reset"
NEXT = 1e-6  # seconds between two messages of a stream
Log = Callable[[str], None]


class Pipe:
    """One direction: what is sent comes to `target`'s process, in order."""

    def __init__(self, network: Network, source: Process, target: Process) -> None:
        self._network, self._source, self._target = network, source, target
        self._last = 0.0
        self._over = False

    def send(self, deliver: Callable[..., None], *args: Any) -> None:
        """`deliver(*args)` is called in the target's process, unless either is dead by then."""
        if self._source.alive and not self._over:
            self._post(deliver, args)

    def end(self, deliver: Callable[..., None], *args: Any) -> None:
        """The last thing that comes, whatever became of the source."""
        if not self._over:
            self._over = True
            self._post(deliver, args)

    def _post(self, deliver: Callable[..., None], args: tuple[Any, ...]) -> None:
        network = self._network
        self._last = max(self._last + NEXT, network.loop.time() + network.latency())
        network.loop.call_at(self._last, self._arrive, deliver, args, context=self._target.context)

    def _arrive(self, deliver: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self._target.alive:
            deliver(*args)
            self._target.check()


class Server:
    """What a process listens with; takes servicers as a grpc.aio.Server does."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The other way to say what `add_registered_method_handlers` says."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        for name, handler in handlers.items():
            self.handlers[f"/{service}/{name}"] = handler


class Network:
    """Who listens where, and all calls that are open. `latency` draws seconds; `log` hears of every message."""

    def __init__(self, loop: VirtualLoop, latency: Callable[[], float], log: Log) -> None:
        self.loop, self.latency, self.log = loop, latency, log
        self.servers: dict[str, Server] = {}
        self.calls: dict[Call, None] = {}
        self._numbers = 0

    def channel(self, process: Process, endpoint: str) -> Channel:
        """A connection of `process` to whoever listens at `endpoint` when it is first used."""
        return Channel(self, process, endpoint)

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def reset(self, process: Process) -> None:
        """`process` is gone: everybody who is in a call with it hears of it."""
        for call in [call for call in self.calls if process in (call.client, call.server)]:
            call.cut(RESET)

    def cut(self, one: Process, other: Process) -> int:
        """Every connection between two processes breaks. How many calls that ends."""
        hit = [call for call in self.calls if {call.client, call.server} == {one, other}]
        for call in hit:
            call.cut("connection cut")
        return len(hit)


class Channel:
    """As grpc.aio.Channel, as far as pdserve uses it."""

    def __init__(self, network: Network, process: Process, endpoint: str) -> None:
        self._network, self._process, self._endpoint = network, process, endpoint
        self._calls: dict[Call, None] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for call in list(self._calls):
            call.cancel()

    def _method(
        self, path: str, request_serializer: Any, response_deserializer: Any, _registered_method: bool = False
    ) -> Callable[..., Call]:
        def begin(request: Any = None, *, timeout: float | None = None, metadata: Any = None) -> Call:
            call = Call(self._network, self._process, self._endpoint, path, (request_serializer, response_deserializer))
            self._calls[call] = None
            call.add_done_callback(lambda done: self._calls.pop(done, None))
            call.begin(request, timeout, tuple(metadata or ()))
            return call

        return begin

    unary_unary = unary_stream = stream_stream = stream_unary = _method


class Call:
    """Both ends of one call; what each end sees comes to it over its pipe."""

    def __init__(self, network: Network, client: Process, endpoint: str, path: str, codec: tuple[Any, Any]) -> None:
        self.client = client
        listener = network.servers.get(endpoint)
        self.server: Process | None = listener.process if listener is not None and listener.process.alive else None
        self.name = f"{client.name}>{endpoint} {path.rpartition('/')[2]}#{network.number()}"
        # What clients are told has stages in it that the machine's own clock measures, and that decide nothing.
        self._says_all = not path.endswith("/Generate")
        self._network, self._loop = network, network.loop
        self._serialize, self._deserialize = codec
        self._handler = listener.handlers[path] if listener is not None and self.server is not None else None
        # The client's end.
        self._inbox: deque[Any] = deque()
        self._status: grpc.aio.AioRpcError | None = None
        self._done = self._cancelled = False
        self._has_metadata = False
        self._news = asyncio.Event()
        self._callbacks: list[Callable[[Call], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        # The server's end.
        self._task: asyncio.Task[None] | None = None
        self._context: Context | None = None
        if self.server is not None:
            self._up, self._down = Pipe(network, client, self.server), Pipe(network, self.server, client)

    def begin(self, request: Any, timeout: float | None, metadata: tuple[Any, ...]) -> None:
        if self.server is None:
            failed = (self._finish, grpc.StatusCode.UNAVAILABLE, "failed to connect", ())
            self._loop.call_later(self._network.latency(), *failed, context=self.client.context)
            return
        self._network.calls[self] = None
        if timeout is not None:
            self._timer = self._loop.call_later(max(0.0, timeout), self._expire, context=self.client.context)
        payload = None if request is None else self._serialize(request)
        self._up.send(self._serve, payload, timeout, metadata)

    # The client's end.

    async def read(self) -> Any:
        """The next message; EOF at a good end. Raises as grpc.aio does."""
        while not self._inbox:
            if self._done:
                self._raise_for_status()
                return grpc.aio.EOF
            self._news.clear()
            try:
                await self._news.wait()
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self._deserialize(self._inbox.popleft())

    async def write(self, message: Any) -> None:
        if self._done:
            raise asyncio.InvalidStateError("RPC already finished.")
        if self.server is None:
            await self.initial_metadata()  # there will be none
            self._raise_for_status()
        self._log(">", payload := self._serialize(message))
        self._up.send(self._take_request, payload)

    async def initial_metadata(self) -> tuple[()]:
        while not (self._has_metadata or self._done):
            self._news.clear()
            try:
                await self._news.wait()
            except asyncio.CancelledError:
                self.cancel()
                raise
        return ()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._messages()

    async def _messages(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def __await__(self) -> Iterator[Any]:
        return self.read().__await__()

    def cancel(self) -> bool:
        """End the call; the server hears of it."""
        if self._done:
            return False
        self._cancelled = True
        self._inbox.clear()
        if self.server is not None:
            self._up.send(self._end_serving)
        self._finish(grpc.StatusCode.CANCELLED, "cancelled locally", ())
        return True

    def done(self) -> bool:
        return self._done

    def add_done_callback(self, callback: Callable[[Call], None]) -> None:
        self._callbacks.append(callback)

    def _expire(self) -> None:
        if not self._done:
            self._up.send(self._end_serving)
            self._finish(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ())

    def _raise_for_status(self) -> None:
        if self._cancelled:
            raise asyncio.CancelledError
        if self._status is not None:
            raise self._status

    def _take_response(self, payload: bytes) -> None:
        if not self._done:
            self._has_metadata = True
            self._inbox.append(payload)
            self._news.set()

    def _take_metadata(self) -> None:
        self._has_metadata = True
        self._news.set()

    def _finish(self, code: grpc.StatusCode, details: str, trailers: Any) -> None:
        if self._done:
            return
        self._network.log(f"{self.name} {code.name} {details}")
        self._done = True
        if self._timer is not None:
            self._timer.cancel()
        if code is not grpc.StatusCode.OK:
            metadata = grpc.aio.Metadata(*trailers)
            self._status = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details=details)
        self._network.calls.pop(self, None)
        self._news.set()
        for callback in self._callbacks:
            callback(self)

    # Both.

    def cut(self, why: str) -> None:
        """The connection breaks: what was sent may still come, and nothing after it but each end's own reset."""
        self._network.calls.pop(self, None)
        self._down.end(self._finish, grpc.StatusCode.UNAVAILABLE, why, ())
        self._up.end(self._end_serving)

    # The server's end.

    def _serve(self, payload: bytes | None, timeout: float | None, metadata: tuple[Any, ...]) -> None:
        assert self._handler is not None
        handler = self._handler
        self._context = Context(self, None if timeout is None else self._loop.time() + timeout, metadata)
        request = None if payload is None else handler.request_deserializer(payload)
        self._log(">", payload or b"")
        self._task = self._loop.create_task(self._handle(handler, request, self._context), name=self.name)

    async def _handle(self, handler: Any, request: Any, context: Context) -> None:
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_stream
        given = context if handler.request_streaming else request
        try:
            if inspect.isasyncgenfunction(behaviour):
                async for response in behaviour(given, context):
                    await context.write(response)
            else:
                response = await behaviour(given, context)
                if response is not None:
                    await context.write(response)
            end: tuple[Any, ...] = (grpc.StatusCode.OK, "", ())
        except Aborted as error:
            end = error.status
        except asyncio.CancelledError:
            end = (grpc.StatusCode.CANCELLED, "the handler was cancelled", ())
        except Exception as error:
            self._loop.call_exception_handler({"message": f"{self.name} failed", "exception": error})
            end = (grpc.StatusCode.UNKNOWN, repr(error), ())
        context.over = True
        self._down.send(self._finish, *end)

    def _take_request(self, payload: bytes) -> None:
        if self._context is not None and not self._context.over:
            self._context.inbox.append(payload)
            self._context.news.set()

    def _end_serving(self) -> None:
        if self._context is not None and self._task is not None and not self._task.done():
            self._context.over = True
            self._task.cancel()

    def _log(self, way: str, payload: bytes) -> None:
        said = f" {len(payload)} {zlib.crc32(payload):08x}" if self._says_all else ""
        self._network.log(f"{self.name} {way}{said}")


class Aborted(Exception):
    """What a handler raises that aborts its call."""

    def __init__(self, status: tuple[Any, ...]) -> None:
        self.status = status


class Context:
    """As grpc.aio.ServicerContext, as far as pdserve uses it."""

    def __init__(self, call: Call, deadline: float | None, metadata: tuple[Any, ...]) -> None:
        self.inbox: deque[bytes] = deque()
        self.news = asyncio.Event()
        self.over = False
        self._call, self._deadline, self._metadata = call, deadline, metadata

    async def read(self) -> Any:
        while not self.inbox:
            if self.over:
                return grpc.aio.EOF
            self.news.clear()
            await self.news.wait()
        return self._call._handler.request_deserializer(self.inbox.popleft())

    async def write(self, message: Any) -> None:
        if self.over:
            raise asyncio.InvalidStateError("RPC already finished.")
        payload = self._call._handler.response_serializer(message)
        self._call._log("<", payload)
        self._call._down.send(self._call._take_response, payload)

    async def send_initial_metadata(self, metadata: Any) -> None:
        self._call._down.send(self._call._take_metadata)

    async def abort_with_status(self, status: grpc.Status) -> None:
        self.over = True
        raise Aborted((status.code, status.details, status.trailing_metadata))

    def invocation_metadata(self) -> tuple[Any, ...]:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self._call._loop.time())


def latencies(rng: random.Random) -> Callable[[], float]:
    """Mostly a fraction of a millisecond, now and then much more."""

    def draw() -> float:
        return rng.uniform(0.02, 0.1) if rng.random() < 0.03 else rng.uniform(0.0001, 0.004)

    return draw
