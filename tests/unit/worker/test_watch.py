"""Watchers see a snapshot, then every change once, in order; a slow one starts again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import pairwise

import grpc
import grpc.aio
import pytest
from msgspec.structs import replace

from pdserve.core.errors import Unavailable
from pdserve.rpc.channel import connect
from pdserve.rpc.errors import RpcError, error_from_call
from pdserve.rpc.server import GrpcServer
from pdserve.rpc.settings import ServiceSettings
from pdserve.rpc.versions import our_versions
from pdserve.transfer.messages import LinkReport, TransferReport
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from pdserve.worker import watch
from pdserve.worker.service import WorkerServicer
from pdserve.worker.watch import WatchBoard, links_to_proto

LINK = LinkReport(
    peer="a",
    epoch=9,
    transport="gloo",
    path="loopback",
    degraded="why",
    bytes_sent=1,
    bytes_received=2,
    bytes_in_flight=3,
    frames_in_flight=4,
    credit=5,
    bytes_per_second=6.0,
    round_trip=0.25,
)
SNAPSHOT = worker_pb2.WorkerSnapshot(worker_id="w", incarnation="i")


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def load(steps: int) -> worker_pb2.WorkerLoad:
    return worker_pb2.WorkerLoad(steps=steps)


def started() -> WatchBoard:
    board = WatchBoard()
    board.start(SNAPSHOT)
    return board


async def following(updates: AsyncIterator[worker_pb2.WatchResponse]) -> worker_pb2.WatchResponse:
    return await asyncio.wait_for(anext(updates), 5)


async def test_a_watcher_sees_snapshot_then_what_is_stored_then_changes() -> None:
    board = started()
    board.publish(load(1), [digest(1), digest(2)])
    async with aclosing(board.watch()) as updates:  # type: ignore[type-var]
        assert (await following(updates)).snapshot == SNAPSHOT
        first = (await following(updates)).delta
        assert first.sequence == 1 and set(first.stored) == {digest(1), digest(2)} and first.load.steps == 1
        board.publish(load(2), [digest(3)], [digest(1)])
        second = (await following(updates)).delta
        assert second.sequence == 2 and list(second.stored) == [digest(3)] and list(second.removed) == [digest(1)]
    assert list(board.stored) == [digest(2), digest(3)]


async def test_loads_replace_each_other_and_only_the_last_change_of_a_hash_is_told() -> None:
    board = started()
    async with aclosing(board.watch()) as updates:  # type: ignore[type-var]
        await following(updates)
        await following(updates)
        board.publish(load(1), [digest(1)])
        board.publish(load(2), [], [digest(1)])
        board.publish(load(3), [digest(2)], [digest(2)])  # evicted and stored again
        delta = (await following(updates)).delta
        assert delta.load.steps == 3 and list(delta.stored) == [digest(2)] and list(delta.removed) == [digest(1)]


def table(bandwidth: float) -> worker_pb2.LinkTable:
    return links_to_proto(TransferReport(links=[replace(LINK, peer="b"), replace(LINK, bytes_per_second=bandwidth)]))


def test_a_report_becomes_a_table_by_peer() -> None:
    """Every field of a link has its own place in it."""
    states = table(7.0).links
    assert [state.peer for state in states] == ["a", "b"]
    one = states[1]
    assert (one.transport, one.path, one.degraded) == ("gloo", "loopback", "why")
    assert (one.bytes_sent, one.bytes_received, one.bytes_in_flight, one.frames_in_flight) == (1, 2, 3, 4)
    assert (one.credit_bytes, one.bytes_per_second, one.round_trip_seconds) == (5, 6.0, 0.25)
    assert states[0].bytes_per_second == 7.0


async def test_a_new_watcher_has_the_link_table_and_later_ones_only_where_it_changed() -> None:
    board = started()
    board.publish_links(table(1.0))
    async with aclosing(board.watch()) as updates:  # type: ignore[type-var]
        await following(updates)
        assert (await following(updates)).delta.links == table(1.0)
        board.publish(load(1))
        assert not (await following(updates)).delta.HasField("links")


async def test_links_that_change_often_are_told_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat brings what had to wait; in between nothing is told, and nothing is lost."""
    monkeypatch.setattr(watch, "HEARTBEAT", 0.05)
    monkeypatch.setattr(watch, "LINKS_PACE", 0.1)
    board, loop = started(), asyncio.get_running_loop()
    told: list[tuple[float, float]] = []
    async with aclosing(board.watch()) as updates:  # type: ignore[type-var]
        await following(updates)
        bandwidth = 0.0
        while not told or told[-1][1] < 20:
            if bandwidth < 20:
                board.publish_links(table(bandwidth := bandwidth + 1))
            delta = (await following(updates)).delta
            if delta.HasField("links"):
                told.append((loop.time(), delta.links.links[0].bytes_per_second))
    times, values = zip(*told, strict=True)
    assert all(later - sooner > 0.09 for sooner, later in pairwise(times))
    assert values[0] == 1 and values[-1] == 20


async def test_the_first_table_comes_also_where_there_are_no_links() -> None:
    """So that a watcher forgets the links of the worker's life before."""
    async with aclosing(started().watch()) as updates:  # type: ignore[type-var]
        await following(updates)
        assert (await following(updates)).delta.HasField("links")


async def test_an_idle_worker_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "HEARTBEAT", 0.02)
    async with aclosing(started().watch()) as updates:  # type: ignore[type-var]
        await following(updates)
        assert [(await following(updates)).delta.sequence for _ in range(3)] == [1, 2, 3]


async def test_many_hashes_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_HASHES_IN_DELTA", 10)
    board = started()
    board.publish(load(1), [digest(number) for number in range(25)])
    async with aclosing(board.watch()) as updates:  # type: ignore[type-var]
        await following(updates)
        deltas = [(await following(updates)).delta for _ in range(3)]
    assert [len(delta.stored) for delta in deltas] == [10, 10, 5]


async def test_a_watcher_that_lags_too_far_behind_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_PENDING", 10)
    board = started()
    async with aclosing(board.watch()) as slow, aclosing(board.watch()) as other:  # type: ignore[type-var]
        await following(slow)
        board.publish(load(1), [digest(number) for number in range(11)])
        with pytest.raises(RpcError) as caught:
            await following(slow)
        assert caught.value.code is grpc.StatusCode.ABORTED
        assert (await following(other)).HasField("snapshot")


async def test_watching_before_the_start_and_after_the_end_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="starting"):
        await following(WatchBoard().watch())
    board = started()
    async with aclosing(board.watch()) as updates:  # type: ignore[type-var]
        await following(updates)
        closing = asyncio.create_task(board.close())
        with pytest.raises(Unavailable, match="stopping"):
            await following(updates)
        await closing


async def test_a_suspended_board_takes_no_watchers_until_it_resumes() -> None:
    board = started()
    async with aclosing(board.watch()) as updates:  # type: ignore[type-var]
        await following(updates)
        board.suspend("the engine is stuck")
        with pytest.raises(Unavailable, match="the engine is stuck"):
            await following(updates)
    with pytest.raises(Unavailable, match="the engine is stuck"):
        await following(board.watch())
    board.resume()
    async with aclosing(board.watch()) as updates:  # type: ignore[type-var]
        assert (await following(updates)).HasField("snapshot")


async def test_who_leaves_in_order_says_so_before_the_end() -> None:
    """Also where both come at once, as with an idle worker."""
    board = started()
    async with aclosing(board.watch()) as updates:  # type: ignore[type-var]
        assert not (await following(updates)).snapshot.draining
        board.set_draining()
        closing = asyncio.create_task(board.close())
        assert (await following(updates)).delta.draining
        assert not closing.done(), "a session that ended now would be a lost worker's"
        with pytest.raises(Unavailable, match="stopping"):
            await following(updates)
        await closing


async def test_over_grpc_drain_is_told_and_a_foreign_version_is_refused() -> None:
    board = started()

    async def drain() -> None:
        board.set_draining()

    name = "pdserve.v1.WorkerService"
    service = (worker_pb2_grpc.add_WorkerServiceServicer_to_server, WorkerServicer(board, drain), name)
    async with GrpcServer(ServiceSettings(), [service]) as server, connect(server.endpoint) as channel:
        stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
        call = stub.Watch(worker_pb2.WatchRequest(protocol=our_versions()), timeout=5)
        try:
            assert (await call.read()).snapshot.worker_id == "w"  # type: ignore[union-attr]
            await stub.Drain(worker_pb2.DrainRequest(), timeout=5)
            while not (await call.read()).delta.draining:  # type: ignore[union-attr]
                pass
        finally:
            call.cancel()
        for request in (
            stub.Watch(worker_pb2.WatchRequest(protocol=worker_pb2.VersionRange(min=7, max=9)), timeout=5).read(),
            stub.OpenLink(worker_pb2.OpenLinkRequest(endpoint="e", worker_id="w"), timeout=5),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await request
            error = error_from_call(caught.value)
            assert "7 to 9 there" in str(error) or caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
