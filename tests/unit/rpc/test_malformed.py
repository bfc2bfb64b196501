"""Bytes that are no message, sent to each kind of method; and an error beside a write that is on its way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from pdserve.core.errors import InvalidRequest
from pdserve.prefix_cache.service import PrefixCacheServicer
from pdserve.prefix_cache.store import BlockStore
from pdserve.rpc.channel import connect
from pdserve.rpc.errors import abort, error_from_call
from pdserve.rpc.server import GrpcServer
from pdserve.rpc.settings import ServiceSettings
from pdserve.rpc.writing import write_whole
from pdserve.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    prefix_cache_pb2_grpc,
    worker_pb2_grpc,
)
from pdserve.worker.service import WorkerServicer
from pdserve.worker.watch import WatchBoard

NO_MESSAGE = b"\x0a\xff"


class Stream(inference_pb2_grpc.InferenceServiceServicer):
    """Reads a stream and writes another, until what it reads is wrong."""

    async def Multiplex(self, request_iterator: AsyncIterator[Any], context: Any) -> None:  # type: ignore[override]
        async def write() -> None:
            text = "x" * 100_000  # more than goes out at once
            item = inference_pb2.MultiplexItem(response=inference_pb2.GenerateResponse(output={"text": text}))
            while True:
                await write_whole(context, inference_pb2.MultiplexResponse(items=[item]))

        writing = asyncio.create_task(write())
        try:
            async for _ in request_iterator:
                pass
        except InvalidRequest as error:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            await abort(context, error)
        finally:
            writing.cancel()


async def test_what_is_no_message_is_invalid_on_every_kind_of_method(caplog: pytest.LogCaptureFixture) -> None:
    async def nothing() -> None: ...

    async def messages() -> AsyncIterator[bytes]:
        yield NO_MESSAGE

    board = WatchBoard()
    cache, worker = PrefixCacheServicer(BlockStore(1 << 20), board), WorkerServicer(board, nothing)
    services: list[Any] = [
        (prefix_cache_pb2_grpc.add_PrefixCacheServiceServicer_to_server, cache, "pdserve.v1.PrefixCacheService"),
        (worker_pb2_grpc.add_WorkerServiceServicer_to_server, worker, "pdserve.v1.WorkerService"),
        (inference_pb2_grpc.add_InferenceServiceServicer_to_server, Stream(), "pdserve.v1.InferenceService"),
    ]
    async with GrpcServer(ServiceSettings(), services) as server, connect(server.endpoint) as channel:
        calls: list[Any] = [
            channel.unary_unary("/pdserve.v1.WorkerService/OpenLink")(NO_MESSAGE, timeout=5),
            channel.unary_stream("/pdserve.v1.WorkerService/Watch")(NO_MESSAGE, timeout=5),
            channel.stream_unary("/pdserve.v1.PrefixCacheService/Store")(messages(), timeout=5),
            channel.stream_stream("/pdserve.v1.InferenceService/Multiplex")(messages(), timeout=5),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                if hasattr(call, "__aiter__"):
                    async for _ in call:
                        pass
                else:
                    await call
            error = error_from_call(caught.value)
            assert isinstance(error, InvalidRequest) and error.field == "message", error
            assert error.message.startswith("cannot be read")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
