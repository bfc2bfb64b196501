"""Bytes that are no message: INVALID_ARGUMENT for the peer, and nothing for the log. Large ones are cleared away.

grpc reads a message before it calls whoever serves it, takes a failure there for that one's bug (UNKNOWN), and logs it
with its traceback. Anybody who reaches the port could fill a disk with these.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from pdserve.core.errors import InvalidRequest
from pdserve.rpc.errors import abort
from pdserve.rpc.garbage import Garbage

if TYPE_CHECKING:  # generic for type checkers alone
    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]


class MalformedMessages(grpc.aio.ServerInterceptor):
    """Reads messages so that one that is none raises InvalidRequest where a stream is read, and else ends the call."""

    def __init__(self) -> None:
        self._garbage = Garbage()
        self._handlers: dict[Handler, Handler] = {}  # those that read so, by those that are served

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        ours = self._handlers.get(handler)
        if ours is None:
            ours = self._handlers[handler] = self._reading(handler)
        return ours

    def _reading(self, handler: Handler) -> Handler:
        assert handler.request_deserializer is not None
        read, write = _reader(handler.request_deserializer, self._garbage), handler.response_serializer
        if handler.stream_stream:
            return grpc.stream_stream_rpc_method_handler(handler.stream_stream, read, write)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(handler.stream_unary, read, write)
        # Those get the bytes, and read them where an error can be told.
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                _reading(handler.unary_stream, read, self._garbage), None, write
            )
        return grpc.unary_unary_rpc_method_handler(_reading(handler.unary_unary, read, self._garbage), None, write)


def _reader(deserialize: Callable[[bytes], Any], garbage: Garbage) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        garbage.left(len(data))
        try:
            return deserialize(data)
        except DecodeError as error:
            raise InvalidRequest("message", f"cannot be read: {error}") from None

    return read


def _reading(behavior: Any, read: Callable[[bytes], Any], garbage: Garbage) -> Any:
    """`behavior`, which takes a message, as one that takes bytes."""

    async def answer(data: bytes, context: Context) -> Any:
        try:
            return await behavior(await _read(data, read, context), context)
        finally:
            garbage.left(len(data))

    async def stream(data: bytes, context: Context) -> Any:
        responses = behavior(await _read(data, read, context), context)
        try:
            async for response in responses:
                yield response
        finally:
            await responses.aclose()

    return stream if inspect.isasyncgenfunction(behavior) else answer


async def _read(data: bytes, read: Callable[[bytes], Any], context: Context) -> Any:
    try:
        return read(data)
    except InvalidRequest as error:
        await abort(context, error)
