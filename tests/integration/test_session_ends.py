"""How requests on a Session begin and end, against a scripted router."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from pdserve.client import Event, EventStream, Finish, PromptInfo, Session
from pdserve.router.multiplex import Multiplex
from pdserve.rpc.errors import DeadlineExceeded, RpcError
from pdserve.v1 import inference_pb2
from tests.integration.scripted_router import Context, ScriptedRouter, hang, listening


class Router(ScriptedRouter):
    """Plays its parts over a shared stream, too."""

    async def Multiplex(  # type: ignore[override]
        self, request_iterator: AsyncIterator[inference_pb2.MultiplexRequest], context: Context
    ) -> None:
        await Multiplex(self.Generate, context.write).run(request_iterator)


async def collect(stream: EventStream) -> list[Event]:
    async with stream as events:
        return [event async for event in events]


def code_of(error: Any) -> grpc.StatusCode:
    assert isinstance(error, RpcError) and "this session is closed" in str(error)
    return error.code


async def test_no_deadline_is_the_routers_own() -> None:
    router = Router()
    async with listening(router) as target, Session(target) as session, asyncio.timeout(10):
        for timeout in (math.inf, None, 30.0):
            assert isinstance((await collect(session.generate("hi", timeout=timeout)))[-1], Finish)
        assert router.remaining[:2] == [None, None]
        assert router.remaining[2] is not None and 20 < router.remaining[2] <= 30
        assert session._stream is not None and not session._stream.lanes


@pytest.mark.parametrize("timeout", [math.nan, 1e300])
async def test_a_time_that_is_none_begins_nothing(timeout: float) -> None:
    router = Router()
    async with listening(router) as target, Session(target) as session, asyncio.timeout(10):
        await collect(session.generate("hi"))
        with pytest.raises(ValueError):
            await collect(session.generate("hi", timeout=timeout))
        assert session._stream is not None and not session._stream.lanes
        await collect(session.generate("hi"))
    assert len(router.requests) == 2


async def test_a_deadline_that_the_router_does_not_keep_is_kept_here() -> None:
    async with listening(Router(hang())) as target, Session(target) as session, asyncio.timeout(10):
        with pytest.raises(DeadlineExceeded):
            await collect(session.generate("hi", timeout=0.05))


@pytest.mark.parametrize("ticks", [1, 2, 3, 10])
async def test_closing_in_the_tick_of_the_first_request_ends_it(ticks: int) -> None:
    """The stream's task may not have run a step by then."""
    async with listening(Router(hang())) as target:
        session = Session(target)
        consumer = asyncio.create_task(collect(session.generate("hi")))
        for _ in range(ticks):
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await session.close()
            with pytest.raises(RpcError) as error:
                await consumer
        assert code_of(error.value) is grpc.StatusCode.CANCELLED


async def test_closing_ends_what_runs_and_what_comes_later() -> None:
    router = Router(hang(), hang())
    async with listening(router) as target, asyncio.timeout(10):
        session = Session(target)
        streams = [session.generate("hi") for _ in range(2)]
        for stream in streams:
            assert isinstance(await anext(stream), PromptInfo)
        consumers = [asyncio.create_task(collect(stream)) for stream in streams]
        await session.close()
        await session.close()
        outcomes = await asyncio.gather(*consumers, return_exceptions=True)
        assert [code_of(outcome) for outcome in outcomes] == [grpc.StatusCode.CANCELLED] * 2
        assert outcomes[0] is not outcomes[1]
        await router.cancelled.wait()
        with pytest.raises(RpcError) as error:
            await collect(session.generate("hi"))
        assert code_of(error.value) is grpc.StatusCode.CANCELLED
