"""A router's session with a prefill worker: who hears of what, and what is told of its end, however it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from pdserve.core.errors import NoCapacity, PdserveError, Unavailable
from pdserve.router.events import Event, FirstToken, PrefillFailed
from pdserve.router.ledger import Ledger, Work
from pdserve.router.prefill_session import PrefillSession
from pdserve.rpc.channel import connect
from pdserve.rpc.errors import to_status
from pdserve.v1 import decode_pb2, prefill_pb2, prefill_pb2_grpc, sequence_pb2

PATIENCE = 5.0
Response = prefill_pb2.PrefillSessionResponse


class Worker(prefill_pb2_grpc.PrefillServiceServicer):
    """Takes whatever comes, and says what it is told to. `reads` False: nothing is read behind the hello."""

    def __init__(self, *, welcomes: bool = True, reads: bool = True) -> None:
        self.taken: asyncio.Queue[Any] = asyncio.Queue()
        self.says: asyncio.Queue[Response | None] = asyncio.Queue()
        self._welcomes, self._reads = welcomes, reads

    async def PrefillSession(self, requests: AsyncIterator[Any], context: Any) -> None:  # type: ignore[override]
        hello = await context.read()
        assert hello.HasField("hello") and hello.hello.router_id == "router-0"
        welcome = decode_pb2.SessionWelcome(worker_id="prefill-0", incarnation="7")
        await context.write(Response(welcome=welcome) if self._welcomes else Response())
        if not self._reads:
            await asyncio.Event().wait()
        saying = asyncio.create_task(self._say(context))
        try:
            while isinstance(request := await context.read(), prefill_pb2.PrefillSessionRequest):
                self.taken.put_nowait(getattr(request, str(request.WhichOneof("command"))))
        finally:
            saying.cancel()

    async def _say(self, context: Any) -> None:
        while True:
            response = await self.says.get()
            assert response is not None
            await context.write(response)


@asynccontextmanager
async def serving(worker: Worker) -> AsyncIterator[tuple[grpc.aio.Server, str]]:
    server = grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(worker, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def opened(worker: Worker, patience: float = PATIENCE) -> AsyncIterator[tuple[PrefillSession, grpc.aio.Server]]:
    """A session that runs."""
    async with serving(worker) as (server, endpoint), connect(endpoint) as channel, asyncio.timeout(4 * PATIENCE):
        session = PrefillSession(channel, "router-0", patience)
        await session.open()
        running = asyncio.create_task(session.run())
        running.add_done_callback(lambda _: session.close("connection to prefill-0 lost"))
        try:
            yield session, server
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


class Heard:
    """What one attempt hears."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._news = asyncio.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._news.set()

    async def until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._news.clear()
            await self._news.wait()


def request(ticket: str, attempt: int = 1, decode: str = "decode-0") -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(ticket=ticket, attempt=attempt, decode_worker_id=decode)


def first_token(ticket: str, attempt: int, token: int, end: int = 0) -> Response:
    step = sequence_pb2.StepToken(ticket=ticket, position=3, token={"id": token})
    return Response(first_token=prefill_pb2.FirstToken(token=step, attempt=attempt, end=end))  # type: ignore[arg-type]


def failed(ticket: str, attempt: int, status: bytes) -> Response:
    return Response(failed=prefill_pb2.PrefillFailed(ticket=ticket, attempt=attempt, status=status))


def status(error: PdserveError) -> bytes:
    return bytes(to_status(error).SerializeToString())


async def test_each_attempt_hears_of_itself() -> None:
    worker, ledger = Worker(), Ledger()
    async with opened(worker) as (session, _):
        assert (session.worker_id, session.incarnation) == ("prefill-0", "7")
        names = [("a", 1), ("a", 2), ("b", 1), ("alone", 1)]
        heard = {name: Heard() for name in names}
        for ticket, attempt in names:
            decode = "" if ticket == "alone" else "decode-0"
            entry = ledger.add(Work(10, 10, 100))
            session.prefill(request(ticket, attempt, decode), entry, heard[ticket, attempt])
        taken = [await worker.taken.get() for _ in names]
        assert [(one.ticket, one.attempt) for one in taken] == names
        worker.says.put_nowait(Response(accepted=prefill_pb2.PrefillAccepted(ticket="a", attempt=2)))
        worker.says.put_nowait(first_token("b", 1, 30))
        worker.says.put_nowait(first_token("a", 2, 20))
        worker.says.put_nowait(first_token("nobody", 1, 1))
        worker.says.put_nowait(failed("a", 1, status(NoCapacity("full"))))
        worker.says.put_nowait(Response(committed=prefill_pb2.PrefillCommitted(ticket="b", attempt=1)))
        worker.says.put_nowait(first_token("alone", 1, 40))
        await heard["alone", 1].until(lambda: bool(heard["alone", 1].events))
        tokens = {name: [e.token.id for e in one.events if isinstance(e, FirstToken)] for name, one in heard.items()}
        assert tokens == {("a", 1): [], ("a", 2): [20], ("b", 1): [30], ("alone", 1): [40]}
        (failure,) = heard["a", 1].events
        assert isinstance(failure, PrefillFailed) and isinstance(failure.error, NoCapacity) and not failure.lost
        # Only the second attempt at the ticket goes on: its KV is on its way.
        assert session.running == 1 and ledger.sequences == 1
        assert ledger.in_flight_tokens == 0  # its prompt is computed
        ledger.reported()
        assert ledger.outstanding_tokens == 10


async def test_what_was_cancelled_is_heard_of_no_more() -> None:
    worker, ledger, heard, other = Worker(), Ledger(), Heard(), Heard()
    async with opened(worker) as (session, _):
        session.prefill(request("t", 1), ledger.add(Work(1)), heard)
        session.cancel("t", 1)
        session.cancel("t", 1)
        session.prefill(request("t", 2), None, other)
        assert ledger.sequences == 0
        taken = [await worker.taken.get() for _ in range(3)]
        assert [type(one).__name__ for one in taken] == ["PrefillRequest", "PrefillCancel", "PrefillRequest"]
        assert [one.attempt for one in taken] == [1, 1, 2]
        worker.says.put_nowait(first_token("t", 1, 1))
        worker.says.put_nowait(failed("t", 1, b""))
        worker.says.put_nowait(failed("t", 2, b"\xff no status"))
        await other.until(lambda: bool(other.events))
        (failure,) = other.events
        assert isinstance(failure, PrefillFailed) and isinstance(failure.error, Unavailable)
        assert not heard.events


async def test_everybody_hears_that_the_worker_is_gone() -> None:
    worker, ledger, heard = Worker(), Ledger(), [Heard(), Heard()]
    async with opened(worker) as (session, server):
        for number, one in enumerate(heard):
            session.prefill(request(f"t{number}"), ledger.add(Work(1)), one)
            await worker.taken.get()
        await server.stop(0)
        for one in heard:
            await one.until(lambda: bool(one.events))  # noqa: B023  waited for here
            (failure,) = one.events
            assert isinstance(failure, PrefillFailed) and failure.lost
            assert isinstance(failure.error, Unavailable) and "prefill-0" in str(failure.error)
        assert ledger.sequences == 0 and session.running == 0
        with pytest.raises(Unavailable, match="prefill-0"):
            session.prefill(request("late"), None, Heard())


async def test_a_worker_that_does_not_read_loses_the_session() -> None:
    worker, heard = Worker(reads=False), Heard()
    async with opened(worker, patience=0.2) as (session, _):
        spec = sequence_pb2.SequenceSpec(token_ids=range(1 << 18))
        for number in range(64):  # more than the windows of a stream take
            large = prefill_pb2.PrefillRequest(ticket=f"t{number}", attempt=1, sequence=spec, decode_worker_id="d")
            session.prefill(large, None, heard)
        await heard.until(lambda: len(heard.events) == 64)
        assert all(isinstance(event, PrefillFailed) and event.lost for event in heard.events)


async def test_a_worker_that_does_not_welcome_is_none() -> None:
    async with serving(Worker(welcomes=False)) as (_, endpoint), connect(endpoint) as channel:
        session = PrefillSession(channel, "router-0", PATIENCE)
        with pytest.raises(Unavailable, match="did not welcome"):
            await session.open()
        session.close("over")
