"""The Python clients against a server that does on command what real ones do by chance: refuse, break off, hang."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from pdserve.client import Client, Output, PromptInfo, Retry, RetryPolicy, SyncClient
from pdserve.core.errors import InvalidRequest, NoCapacity, Unavailable
from pdserve.rpc.errors import DeadlineExceeded, RpcError
from tests.integration.client_ends import KINDS, AnyClient, Blocking
from tests.integration.scripted_router import (
    ANSWER,
    SEED,
    ScriptedRouter,
    answer,
    begin_anew,
    end_early,
    fail,
    hang,
    listening,
)

PATIENCE = 10.0
SOON = RetryPolicy(max_retries=4, initial_backoff=0.01, max_backoff=0.02)
both = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@asynccontextmanager
async def asking(
    kind: type[AnyClient], router: ScriptedRouter, **options: Any
) -> AsyncIterator[tuple[AnyClient, list[Retry]]]:
    """A client of `router`, and what it tells of its retries."""
    retries: list[Retry] = []
    async with listening(router) as target:
        client = kind(target, **{"retry": SOON, "on_retry": retries.append, **options})  # type: ignore[call-arg]
        try:
            yield client, retries
        finally:
            await client.close()


async def within(event: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE):
        await event.wait()


@both
async def test_a_refusal_is_retried_when_it_says(kind: type[AnyClient], caplog: pytest.LogCaptureFixture) -> None:
    router = ScriptedRouter(fail(NoCapacity("full", 0.15)), fail(NoCapacity("full", 0.05), prompt=True))
    caplog.set_level(logging.INFO, "pdserve.client")
    async with asking(kind, router) as (client, retries):
        done = await client.complete("hi")
    assert done.text == ANSWER
    assert [(retry.method, retry.number, retry.delay) for retry in retries] == [
        ("Generate", 1, 0.15),
        ("Generate", 2, 0.05),
    ]
    first, second, third = router.times
    assert second - first >= 0.15 and third - second >= 0.05
    assert [record.getMessage() for record in caplog.records] == [
        "Generate failed (full); retry 1 in 0.150 s",
        "Generate failed (full); retry 2 in 0.050 s",
    ]


@both
async def test_a_retry_asks_for_what_was_told_and_tells_it_once(kind: type[AnyClient]) -> None:
    """The router draws a seed; what it said of it holds for the answer too, though another try made that."""
    router = ScriptedRouter(fail(Unavailable("worker lost"), prompt=True))
    async with asking(kind, router) as (client, _):
        events = await client.take(100)
    infos = [event for event in events if isinstance(event, PromptInfo)]
    assert [(info.request_id, info.params.seed) for info in infos] == [("drawn", SEED)]
    assert "".join(event.text for event in events if isinstance(event, Output)) == ANSWER
    first, second = router.requests
    assert (second.request_id, second.model, second.sampling.seed) == ("drawn", "tiny", SEED)
    assert first.text == second.text == "hi"


@both
async def test_an_answer_that_breaks_off_is_resumed(kind: type[AnyClient]) -> None:
    """Behind what was shown, under the id and the seed that were told; and as often as there is progress."""
    broken = [fail(Unavailable("worker lost"), told=ANSWER[: count + 1]) for count in range(4)]
    router = ScriptedRouter(*broken, broken[3])
    async with asking(kind, router, retry=RetryPolicy(2, 0.01, 0.02)) as (client, retries):
        done = await client.complete("hi")
    assert (done.text, done.token_ids) == (ANSWER, list(ANSWER.encode()))
    assert [retry.number for retry in retries] == [1, 1, 1, 1, 2]
    resumed = [bytes(request.resume.ids).decode() for request in router.requests]
    assert resumed == ["", "h", "he", "hel", "hell", "hell"]
    assert {(request.request_id, request.sampling.seed) for request in router.requests[1:]} == {("drawn", SEED)}


@both
async def test_without_progress_a_resumed_answer_is_given_up(kind: type[AnyClient]) -> None:
    router = ScriptedRouter(*[fail(Unavailable("worker lost"), told="he")] * 9)
    async with asking(kind, router) as (client, retries):
        with pytest.raises(Unavailable, match="worker lost"):
            await client.complete("hi")
    assert [retry.number for retry in retries] == [1, 2, 3, 4]


@both
async def test_a_router_that_begins_anew_is_no_use(kind: type[AnyClient]) -> None:
    """What it tells is another answer's, perhaps."""
    router = ScriptedRouter(fail(Unavailable("worker lost"), told="he"), begin_anew)
    async with asking(kind, router) as (client, _):
        with pytest.raises(RpcError, match="token 0 came where token 2 was due"):
            await client.complete("hi")
        assert (await client.complete("hi")).text == ANSWER  # the client is as good as before


@both
async def test_of_several_routers_one_is_asked_until_it_fails(kind: type[AnyClient]) -> None:
    lost = ScriptedRouter(answer, fail(Unavailable("draining"), told="he"))
    other = ScriptedRouter()
    async with listening(lost) as first, listening(other) as second:
        retries: list[Retry] = []
        client = kind([first, second], retry=RetryPolicy(1, 60.0, 60.0), on_retry=retries.append)
        try:
            texts = [(await client.complete("hi")).text for _ in range(3)]
        finally:
            await client.close()
    assert texts == [ANSWER] * 3 and (len(lost.requests), len(other.requests)) == (2, 2)
    assert [retry.delay for retry in retries] == [0.0], "the other one is there: nothing to wait for"
    assert bytes(other.requests[0].resume.ids) == b"he" and not other.requests[1].resume.ids


@both
async def test_retries_are_counted(kind: type[AnyClient]) -> None:
    router = ScriptedRouter(*[fail(Unavailable("draining"))] * 9)
    async with asking(kind, router) as (client, retries):
        with pytest.raises(Unavailable, match="draining"):
            await client.complete("hi")
    assert [retry.number for retry in retries] == [1, 2, 3, 4] and len(router.requests) == 5
    assert all(retry.delay <= SOON.max_backoff for retry in retries)


@both
async def test_a_refusal_beyond_the_deadline_is_told_at_once(kind: type[AnyClient]) -> None:
    router = ScriptedRouter(fail(NoCapacity("full", 3600.0)))
    async with asking(kind, router, timeout=600.0) as (client, retries):
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(NoCapacity) as caught:
                await client.complete("hi")
    assert caught.value.retry_after == 3600.0 and retries == []


@both
async def test_what_cannot_succeed_is_not_retried(kind: type[AnyClient]) -> None:
    router = ScriptedRouter(fail(InvalidRequest("text", "empty")))
    async with asking(kind, router) as (client, retries):
        with pytest.raises(InvalidRequest) as caught:
            await client.complete("hi")
    assert caught.value.field == "text" and retries == []


@both
async def test_each_try_is_given_what_is_left_of_the_deadline(kind: type[AnyClient]) -> None:
    """The client's own, or the call's. gRPC sends a deadline rounded up, by a few percent at most."""
    router = ScriptedRouter(fail(NoCapacity("full", 0.5)), fail(NoCapacity("full", 0.5)))
    async with asking(kind, router, timeout=4.0) as (client, _):
        await client.complete("hi")
        await client.complete("hi", timeout=60.0)
    first, second, third, other = [remaining or 0.0 for remaining in router.remaining]
    assert 4.1 > first > 3.5 * 1.03 > second > 3.0 * 1.03 > third
    assert 62.0 > other > 50.0


@both
async def test_a_deadline_that_passes_is_typed_and_ends_the_request(kind: type[AnyClient]) -> None:
    router = ScriptedRouter(hang(told="he"))
    async with asking(kind, router) as (client, retries):
        with pytest.raises(DeadlineExceeded):
            await client.complete("hi", timeout=0.3)
        await within(router.cancelled)
    assert retries == []


@both
async def test_no_deadline_at_all(kind: type[AnyClient]) -> None:
    """math.inf overrides the client's own."""
    router = ScriptedRouter()
    async with asking(kind, router, timeout=5.0) as (client, _):
        await client.complete("hi", timeout=float("inf"))
    # gRPC tells the server of no deadline as of one that is far away.
    assert router.remaining[0] is None or router.remaining[0] > 1e6


@both
@pytest.mark.parametrize("dropped", [False, True], ids=["left", "dropped"])
@pytest.mark.parametrize("count", [1, 3], ids=["before a token", "after two"])
async def test_leaving_early_cancels_on_the_server(kind: type[AnyClient], dropped: bool, count: int) -> None:
    router = ScriptedRouter(hang(told="he"))
    async with asking(kind, router) as (client, _):
        assert len(await client.take(count, dropped=dropped)) == count
        await within(router.cancelled)


@both
async def test_an_exception_in_the_block_cancels_on_the_server(kind: type[AnyClient]) -> None:
    router = ScriptedRouter(hang(told="he"))
    async with asking(kind, router) as (client, _):
        with pytest.raises(ZeroDivisionError):
            await client.take(2, wrong=ZeroDivisionError())
        await within(router.cancelled)


@both
async def test_closing_ends_what_runs_with_a_typed_error(kind: type[AnyClient]) -> None:
    router = ScriptedRouter(hang(told="he"))
    async with asking(kind, router) as (client, _):
        waiting = asyncio.create_task(client.take(100))
        await within(router.called)
        await client.close()
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(RpcError) as caught:
                await waiting
        await within(router.cancelled)
        with pytest.raises(RpcError, match="closed"):
            await client.complete("hi")
        with pytest.raises(RpcError, match="closed"):
            await client.models()
    assert caught.value.code is grpc.StatusCode.CANCELLED


@both
async def test_closing_ends_the_wait_for_a_retry(kind: type[AnyClient]) -> None:
    router = ScriptedRouter(fail(NoCapacity("full", 3600.0)))
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with asking(kind, router, on_retry=lambda _: loop.call_soon_threadsafe(told.set)) as (client, _):
        waiting = asyncio.create_task(client.complete("hi"))
        await within(told)
        await client.close()
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(RpcError, match="closed"):
                await waiting


@both
async def test_a_server_that_comes_up_late_is_found_by_retries(kind: type[AnyClient]) -> None:
    async with listening(ScriptedRouter()) as target:
        port = int(target.rpartition(":")[2])
    refused = asyncio.Event()
    loop = asyncio.get_running_loop()
    patient = RetryPolicy(max_retries=100, initial_backoff=0.1, max_backoff=0.2)
    client = kind(target, retry=patient, on_retry=lambda _: loop.call_soon_threadsafe(refused.set))  # type: ignore[call-arg]
    try:
        waiting = asyncio.create_task(client.complete("hi", timeout=PATIENCE))
        await within(refused)
        async with listening(ScriptedRouter(), port):
            assert (await waiting).text == ANSWER
    finally:
        await client.close()


@both
async def test_waiting_for_a_server_uses_up_no_retries(kind: type[AnyClient]) -> None:
    async with listening(ScriptedRouter()) as target:
        port = int(target.rpartition(":")[2])
    retries: list[Retry] = []
    client = kind(target, wait_for_ready=True, on_retry=retries.append)  # type: ignore[call-arg]
    try:
        with pytest.raises(DeadlineExceeded):
            await client.complete("hi", timeout=0.3)
        waiting = asyncio.create_task(client.complete("hi", timeout=PATIENCE))
        async with listening(ScriptedRouter(), port):
            assert (await waiting).text == ANSWER
    finally:
        await client.close()
    assert retries == []


@both
async def test_calls_that_compute_nothing_are_retried_too(kind: type[AnyClient]) -> None:
    router = ScriptedRouter(refusals=[Unavailable("starting"), NoCapacity("full", 0.05), Unavailable("starting")])
    async with asking(kind, router) as (client, retries):
        assert [model.name for model in await client.models()] == ["tiny"]
    assert [retry.method for retry in retries] == ["ListModels"] * 3
    assert retries[1].delay == 0.05


@both
async def test_an_answer_without_its_end_is_an_error(kind: type[AnyClient]) -> None:
    router = ScriptedRouter(end_early)
    async with asking(kind, router) as (client, _):
        with pytest.raises(RpcError, match="without a finish"):
            await client.complete("hi")


@both
async def test_a_closed_client_leaves_no_connection_and_no_thread(kind: type[AnyClient]) -> None:
    """The server is a socket that never says a word: what it sees is what the client does with its end."""
    connections: list[asyncio.Task[Any] | None] = []

    async def read_to_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())
        while await reader.read(1 << 16):
            pass
        writer.close()
        await writer.wait_closed()

    before = set(threading.enumerate())
    async with await asyncio.start_server(read_to_the_end, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        client = kind(f"{host}:{port}", wait_for_ready=True)  # type: ignore[call-arg]
        with pytest.raises(DeadlineExceeded):
            await client.models(timeout=0.3)
        await client.close()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*filter(None, connections))
    assert connections
    # Of an event loop's threads, some stay: its executor's, and the one in which grpc.aio polls for all of a process.
    for thread in set(threading.enumerate()) - before if kind is Blocking else ():
        if not thread.name.startswith("asyncio_"):
            await asyncio.to_thread(thread.join, PATIENCE)
            assert not thread.is_alive(), thread


async def test_threads_share_one_client() -> None:
    """Each thread gets its own answer, while one of them hangs and is cancelled by another."""
    router = ScriptedRouter(hang(told="he"))
    async with listening(router) as target:
        with SyncClient(target) as client:
            stream = client.generate("hi")
            assert isinstance(await asyncio.to_thread(next, stream), PromptInfo)
            reading = asyncio.create_task(asyncio.to_thread(lambda: list(stream)))
            answers = await asyncio.gather(
                *(asyncio.to_thread(client.complete, "hi", request_id=f"r{index}") for index in range(16))
            )
            assert [(done.prompt.request_id, done.text) for done in answers] == [(f"r{i}", ANSWER) for i in range(16)]
            await asyncio.to_thread(stream.close)
            async with asyncio.timeout(PATIENCE):
                with pytest.raises(RpcError) as caught:
                    await reading
            await within(router.cancelled)
            assert caught.value.code is grpc.StatusCode.CANCELLED
            assert list(stream) == []


async def test_a_cancelled_task_is_cancelled_and_not_failed() -> None:
    router = ScriptedRouter(hang())
    async with listening(router) as target, Client(target) as client:
        task = asyncio.create_task(client.complete("hi"))
        await within(router.called)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await within(router.cancelled)


@both
async def test_unknown_options_are_refused_before_anything_is_sent(kind: type[AnyClient]) -> None:
    router = ScriptedRouter()
    async with asking(kind, router) as (client, _):
        with pytest.raises(TypeError, match="did you mean 'max_tokens'"):
            await client.complete("hi", max_token=3)
    assert router.requests == []


async def test_the_command_says_that_it_tries_again() -> None:
    """`pdserve generate` retries like any client; what it says of it is no part of the answer."""
    router = ScriptedRouter(fail(NoCapacity("full", 0.05)), answer, fail(InvalidRequest("text", "empty")))
    async with listening(router) as target:
        for status, text, words in [(0, f"{ANSWER}\n", "full; trying again in 0.1 s"), (1, "", "text: empty")]:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pdserve.cli", "generate", "hi", "--target", target),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            said, wrong = await asyncio.wait_for(process.communicate(), 60.0)
            assert (process.returncode, said.decode()) == (status, text), wrong
            assert words in wrong.decode()
