"""Many requests over one stream: for gateways, and whoever else has many at a time.

A call of its own costs each request a message for every few tokens. Here one message has what is new of all of them,
and a request whose reader lags gets what has gathered as one Output.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from types import TracebackType
from typing import Self, Unpack

import grpc
import grpc.aio

from pdserve.client.aio import EventStream
from pdserve.client.events import Event
from pdserve.client.exchange import Exchange
from pdserve.client.options import GenerateOptions, Prompt
from pdserve.core.errors import PdserveError, Unavailable
from pdserve.rpc.access import Access
from pdserve.rpc.api_keys import check_key
from pdserve.rpc.channel import connect
from pdserve.rpc.errors import DeadlineExceeded, RpcError, error_from_call, error_from_status
from pdserve.rpc.tenant import TENANT
from pdserve.rpc.tls import Tls
from pdserve.telemetry.tracing import TRACEPARENT
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc

# So many messages for a reader that lags are kept as they came, then they are joined: a token alone in its message
# weighs ten times what it does among others.
_KEPT = 256
# The router ends a request at its deadline; who hears nothing of that for so long, in seconds, ends it here.
_GRACE = 1.0


class Broken(Unavailable):
    """The stream to the router broke, with every request on it. Another router can go on with them."""


class Session:
    """A stream to one router, opened by the first request and again by the next one after it was lost. Use it with
    `async with`, or `close` it. It never retries: what was lost raises Broken, which is Unavailable, and what is asked
    of a closed one RpcError with CANCELLED, as a `Client` does."""

    def __init__(self, target: str, *, api_key: str = "", tls: Tls | None = None) -> None:
        """`target` is the router's host:port. `api_key` is shown with each request that brings none.
        `tls` as for a `Client`."""
        self._key = check_key(api_key)
        self._channel = connect(target, Access(tls=tls))
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._numbers = itertools.count(1)
        self._stream: _Stream | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the stream, which cancels what still runs on it: its readers get RpcError with CANCELLED."""
        self._closed = True
        if self._stream is not None:
            await self._stream.close()
        await self._channel.close()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> EventStream:
        """Run one request; events and options as in `Client.generate`. Leaving the stream cancels it on the server."""
        return EventStream(self.events(Exchange(prompt, {"api_key": self._key, **options})))

    async def events(self, exchange: Exchange) -> AsyncGenerator[Event]:
        """What is new of `exchange`, which may have had other tries, to its end. Close it to cancel."""
        if self._closed:
            raise _closed()
        timeout = None if exchange.timeout is None or math.isinf(exchange.timeout) else exchange.timeout
        metadata = dict(exchange.metadata)
        # First, because it raises ValueError for a time that is none.
        begin = pb.MultiplexBegin(
            request=exchange.request,
            time_remaining_ms=0 if timeout is None else max(1, round(timeout * 1e3)),
            traceparent=metadata.get(TRACEPARENT, ""),
            tenant_id=metadata.get(TENANT, ""),
            api_key=exchange.api_key,
        )
        if self._stream is None or self._stream.ended:
            self._stream = _Stream(self._stub.Multiplex())
        stream, number = self._stream, next(self._numbers)
        lane = _Lane()
        timer = None
        if timeout is not None:
            late = DeadlineExceeded(f"no answer within {timeout:.3g} s")
            timer = asyncio.get_running_loop().call_later(timeout + _GRACE, lane.fail, late)
        stream.lanes[number] = lane
        finished = False
        try:
            stream.send(pb.MultiplexRequest(number=number, begin=begin))
            while not finished:
                for response in await lane.take():
                    finished = response.HasField("finish")
                    event = exchange.take(response)
                    if event is not None:
                        yield event
        finally:
            del stream.lanes[number]
            if timer is not None:
                timer.cancel()
            if not (finished or lane.ended):
                stream.send(pb.MultiplexRequest(number=number, cancel=pb.MultiplexCancel()))


class _Lane:
    """What came for one request. `ended` once the router will say no more."""

    def __init__(self) -> None:
        self.ended = False
        self._pending: list[pb.GenerateResponse] = []
        self._loose = 0  # of them at the end, not joined yet
        self._error: PdserveError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def feed(self, item: pb.MultiplexItem) -> None:
        if item.HasField("error"):
            self.end(error_from_status(item.error))
        else:
            self._pending.append(item.response)
            self._loose += 1
            if self._loose == _KEPT:
                self._pending[-_KEPT:] = _joined(self._pending[-_KEPT:])
                self._loose = 0
            self._wake()

    def end(self, error: PdserveError) -> None:
        self.ended = True
        self.fail(error)

    def fail(self, error: PdserveError) -> None:
        """Raise `error` in `take`, once what came before it was taken."""
        self._error = self._error or error
        self._wake()

    async def take(self) -> list[pb.GenerateResponse]:
        """Everything new, outputs joined to one; waits until there is something. Raises PdserveError."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        taken, self._pending, self._loose = self._pending, [], 0
        return taken if len(taken) == 1 else _joined(taken)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Stream:
    """One Multiplex call, from its beginning to its end."""

    def __init__(self, call: grpc.aio.StreamStreamCall[pb.MultiplexRequest, pb.MultiplexResponse]) -> None:
        self.lanes: dict[int, _Lane] = {}
        self.ended = False
        self._call = call
        self._outgoing: asyncio.Queue[pb.MultiplexRequest] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(), name="multiplex")

    def send(self, request: pb.MultiplexRequest) -> None:
        """Put it on its way; does nothing once the stream has ended."""
        if not self.ended:
            self._outgoing.put_nowait(request)

    async def close(self) -> None:
        self._end(_closed)  # not left to the task: cancelled before its first step, it runs none of its code
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        failure: grpc.aio.AioRpcError | None = None
        writing = asyncio.create_task(self._write(), name="multiplex requests")
        try:
            async for message in self._call:
                for item in message.items:
                    lane = self.lanes.get(item.number)
                    if lane is not None:  # it was left a moment ago
                        lane.feed(item)
        except grpc.aio.AioRpcError as error:
            failure = error
        finally:
            self._end(lambda: _lost(failure))
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    def _end(self, error: Callable[[], PdserveError]) -> None:
        """Cancel the call, and tell each lane an `error` of its own. Does nothing once the stream has ended."""
        if self.ended:
            return
        self.ended = True
        self._call.cancel()
        for lane in self.lanes.values():
            lane.end(error())

    async def _write(self) -> None:
        # A failed write says less about the end of the call than its reader is told.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._call.write(await self._outgoing.get())


def _lost(failure: grpc.aio.AioRpcError | None) -> PdserveError:
    error = error_from_call(failure) if failure else Unavailable("the stream to the router ended")
    return Broken(str(error)) if isinstance(error, Unavailable) else error


def _closed() -> RpcError:
    return RpcError(grpc.StatusCode.CANCELLED, "this session is closed")


def _joined(responses: list[pb.GenerateResponse]) -> list[pb.GenerateResponse]:
    """Neighbouring outputs as one."""
    found: list[pb.GenerateResponse] = []
    for is_output, group in itertools.groupby(responses, lambda response: response.HasField("output")):
        first, *others = group
        found.append(first)
        if is_output:
            first.output.text = "".join([first.output.text, *(other.output.text for other in others)])
            for other in others:
                first.output.tokens.extend(other.output.tokens)
        else:
            found += others
    return found
