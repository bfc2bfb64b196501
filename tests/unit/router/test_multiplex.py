"""Many requests over one stream: what is said at one time goes together, and behind a slow reader it gathers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from pdserve.core.errors import InvalidRequest, NoCapacity, PdserveError
from pdserve.router.multiplex import MAX_LANES, Multiplex, Outbox
from pdserve.rpc.errors import DeadlineExceeded, RpcError, abort, error_from_status
from pdserve.telemetry.tracing import MAX_TRACEPARENT
from pdserve.v1 import inference_pb2 as pb

Handler = Callable[[pb.GenerateRequest, Any], Awaitable[None]]


def begin(number: int, **fields: Any) -> pb.MultiplexRequest:
    return pb.MultiplexRequest(number=number, begin=pb.MultiplexBegin(**fields))


def cancel(number: int) -> pb.MultiplexRequest:
    return pb.MultiplexRequest(number=number, cancel=pb.MultiplexCancel())


def text(value: str) -> pb.GenerateResponse:
    return pb.GenerateResponse(output=pb.Output(text=value))


class Client:
    """The other end: a stream of requests, and the messages that came."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[pb.MultiplexRequest | None] = asyncio.Queue()
        self.messages: asyncio.Queue[pb.MultiplexResponse] = asyncio.Queue()
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, message: pb.MultiplexResponse) -> None:
        self.messages.put_nowait(message)
        await self.reads.wait()

    async def stream(self) -> AsyncIterator[pb.MultiplexRequest]:
        while (request := await self.requests.get()) is not None:
            yield request

    def ask(self, *requests: pb.MultiplexRequest | None) -> None:
        for request in requests:
            self.requests.put_nowait(request)


async def settle() -> None:
    """Let everything run that does not wait for something."""
    for _ in range(20):
        await asyncio.sleep(0)


async def served(handler: Handler, *requests: pb.MultiplexRequest) -> list[pb.MultiplexItem]:
    """All items that a call with these requests, and no more, is answered with."""
    client = Client()
    client.ask(*requests, None)
    async with asyncio.timeout(10):
        await Multiplex(handler, client.send).run(client.stream())
    return [item for _ in range(client.messages.qsize()) for item in client.messages.get_nowait().items]


async def test_what_is_said_at_one_time_is_one_message() -> None:
    async def handler(request: pb.GenerateRequest, context: Any) -> None:
        await context.write(text(request.text))
        await context.write(text(request.text.upper()))

    client = Client()
    client.ask(begin(1, request={"text": "a"}), begin(2, request={"text": "b"}), begin(3, request={"text": "c"}), None)
    await Multiplex(handler, client.send).run(client.stream())
    messages = [client.messages.get_nowait() for _ in range(client.messages.qsize())]
    said = [[(item.number, item.response.output.text) for item in message.items] for message in messages]
    assert sum(said, []) == [(1, "a"), (2, "b"), (3, "c"), (1, "A"), (2, "B"), (3, "C")]  # noqa: RUF017
    assert len(said) <= 3


async def test_a_write_waits_until_it_was_sent() -> None:
    """So a request behind a slow reader gathers its tokens, whatever the others do."""
    written: list[str] = []

    async def handler(request: pb.GenerateRequest, context: Any) -> None:
        for value in ("one", "two"):
            await context.write(text(value))
            written.append(value)

    client = Client()
    client.reads.clear()
    client.ask(begin(1), None)
    running = asyncio.create_task(Multiplex(handler, client.send).run(client.stream()))
    await client.messages.get()
    assert written == [] and client.messages.empty()
    client.reads.set()
    await running
    assert written == ["one", "two"]


async def test_a_request_has_what_a_call_of_its_own_has() -> None:
    seen: dict[str, Any] = {}

    async def handler(request: pb.GenerateRequest, context: Any) -> None:
        seen[request.text] = dict(context.invocation_metadata()), context.time_remaining()

    given = begin(1, request={"text": "a"}, time_remaining_ms=5000, traceparent="00-x", tenant_id="a")
    await served(handler, given, begin(2, request={"text": "b"}))
    metadata, remaining = seen["a"]
    assert metadata == {"traceparent": "00-x", "x-tenant-id": "a"} and 4 < remaining <= 5
    assert seen["b"] == ({}, None)


async def test_a_traceparent_that_is_too_long_for_one_is_left_out() -> None:
    seen: list[int] = []

    async def handler(request: pb.GenerateRequest, context: Any) -> None:
        seen.append(sum(len(value) for _, value in context.invocation_metadata()))

    await served(handler, *(begin(length, traceparent="x" * length) for length in (MAX_TRACEPARENT, 257, 10_000_000)))
    assert seen == [256, 0, 0]


@pytest.mark.parametrize("error", [InvalidRequest("text", "no"), NoCapacity("full", 2.5), DeadlineExceeded("late")])
async def test_a_refusal_is_an_item_and_keeps_its_type(error: PdserveError) -> None:
    async def handler(request: pb.GenerateRequest, context: Any) -> None:
        if request.text == "bad":
            await abort(context, error)
        await context.write(text("fine"))

    items = await served(handler, begin(1, request={"text": "bad"}), begin(2, request={"text": "good"}))
    by_number = {item.number: item for item in items}
    found = error_from_status(by_number[1].error)
    assert (type(found), str(found)) == (type(error), str(error))
    assert getattr(found, "retry_after", None) == getattr(error, "retry_after", None)
    assert by_number[2].response.output.text == "fine"


async def test_a_bug_in_one_request_is_an_error_of_it_alone() -> None:
    async def handler(request: pb.GenerateRequest, context: Any) -> None:
        if request.text == "bad":
            raise ValueError("the prompt was: secret")
        await context.write(text("fine"))

    items = await served(handler, begin(1, request={"text": "bad"}), begin(2, request={"text": "good"}))
    errors = [error_from_status(item.error) for item in items if item.HasField("error")]
    assert [type(error) for error in errors] == [RpcError] and "secret" not in str(errors[0])
    assert len(items) == 2


async def test_cancel_ends_one_and_the_end_of_the_call_all() -> None:
    ended: list[str] = []
    started = asyncio.Semaphore(0)

    async def handler(request: pb.GenerateRequest, context: Any) -> None:
        started.release()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(request.text)

    client = Client()
    running = asyncio.create_task(Multiplex(handler, client.send).run(client.stream()))
    client.ask(*(begin(number, request={"text": str(number)}) for number in (1, 2, 3)))
    for _ in range(3):
        await started.acquire()
    client.ask(cancel(2), cancel(99), begin(4, request={"text": "4"}))
    await started.acquire()
    assert ended == ["2"]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(ended) == ["1", "2", "3", "4"]


async def test_a_number_in_use_ends_the_call() -> None:
    async def handler(request: pb.GenerateRequest, context: Any) -> None:
        await asyncio.Event().wait()

    with pytest.raises(InvalidRequest, match="has not ended"):
        await served(handler, begin(1), begin(1))


async def test_an_item_that_was_not_sent_goes_with_its_writer() -> None:
    """Else a peer that begins, cancels and never reads would have the router hold an answer for each."""
    sent: list[list[int]] = []
    reads = asyncio.Event()

    async def send(message: pb.MultiplexResponse) -> None:
        sent.append([item.number for item in message.items])
        await reads.wait()

    outbox = Outbox(send)
    running = asyncio.create_task(outbox.run())
    first = asyncio.create_task(outbox.put(pb.MultiplexItem(number=1)))
    await settle()
    assert sent == [[1]]
    waiting = [asyncio.create_task(outbox.put(pb.MultiplexItem(number=7))) for _ in range(50)]  # all alike
    kept = asyncio.create_task(outbox.put(pb.MultiplexItem(number=7)))
    await settle()
    for task in (first, *waiting):
        task.cancel()
    await settle()
    assert len(outbox._items) == 1
    kept.cancel()
    await settle()
    assert not outbox._items
    reads.set()
    await settle()
    assert sent == [[1]], "nothing is left to send, so nothing is sent"
    await asyncio.wait_for(outbox.put(pb.MultiplexItem(number=8)), 5)
    assert sent == [[1], [8]]
    running.cancel()


async def test_a_peer_that_never_reads_makes_nothing_grow() -> None:
    async def handler(request: pb.GenerateRequest, context: Any) -> None:
        await context.write(text("x" * 1000))

    client = Client()
    client.reads.clear()
    call = Multiplex(handler, client.send)
    running = asyncio.create_task(call.run(client.stream()))
    for number in range(200):
        client.ask(begin(number))
        await settle()
        client.ask(cancel(number))
        await settle()
    assert client.messages.qsize() == 1, "the first is on its way"
    assert not call._outbox._items and not call._tasks
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_more_than_a_stream_can_take_is_refused_one_after_the_other() -> None:
    assert MAX_LANES == 4096
    started: list[str] = []
    finish = asyncio.Event()

    async def handler(request: pb.GenerateRequest, context: Any) -> None:
        started.append(request.text)
        await finish.wait()

    client = Client()
    client.reads.clear()
    call = Multiplex(handler, client.send, max_lanes=2)
    running = asyncio.create_task(call.run(client.stream()))
    client.ask(*(begin(number, request={"text": str(number)}) for number in range(100)))
    await settle()
    assert started == ["0", "1"]
    assert client.messages.qsize() == 1 and not call._outbox._items and client.requests.qsize() == 97
    client.reads.set()
    await settle()
    async with asyncio.timeout(5):
        for number in range(2, 100):
            [item] = (await client.messages.get()).items
            error = error_from_status(item.error)
            assert (item.number, type(error)) == (number, NoCapacity)
            assert isinstance(error, NoCapacity) and error.retry_after == 1.0
    client.ask(cancel(1))
    await settle()
    client.ask(begin(100, request={"text": "100"}), None)
    await settle()
    assert started == ["0", "1", "100"], "there is room again"
    finish.set()
    await asyncio.wait_for(running, 5)


async def test_one_that_is_cancelled_before_it_began_takes_no_room() -> None:
    async def handler(request: pb.GenerateRequest, context: Any) -> None:
        await context.write(text("fine"))

    requests = [request for number in range(10) for request in (begin(number), cancel(number))]
    client = Client()
    client.ask(*requests)
    call = Multiplex(handler, client.send, max_lanes=10)
    running = asyncio.create_task(call.run(client.stream()))
    await settle()
    assert not call._tasks
    client.ask(begin(3), None)
    await asyncio.wait_for(running, 5)
    assert [item.number for item in client.messages.get_nowait().items] == [3]
