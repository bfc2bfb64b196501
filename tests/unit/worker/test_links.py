"""Two workers' link controls, over real gRPC, with recorded engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from pdserve.core.errors import LayoutMismatch, Unavailable
from pdserve.core.layout import KVLayout
from pdserve.rpc.convert_link import Hello
from pdserve.rpc.errors import RpcError
from pdserve.rpc.server import GrpcServer
from pdserve.rpc.settings import ServiceSettings
from pdserve.rpc.versions import PROTOCOL_MAX, PROTOCOL_MIN
from pdserve.transfer.messages import Grant, StoreSet
from pdserve.transfer.path import Facts
from pdserve.v1 import kv_pb2_grpc
from pdserve.worker import link_stream as stream_module
from pdserve.worker import links as links_module
from pdserve.worker.greeting import choose_transport
from pdserve.worker.links import Links
from pdserve.worker.messages import LinkClosed, LinkControl, LinkEstablished, LinkMessage, LinkOpened

LAYOUT = KVLayout(16, 2, 2, 16, "float32", b"f" * 16)
HELLO = Hello("a", "1", LAYOUT, "auto", "cpu", "node", PROTOCOL_MIN, PROTOCOL_MAX)


class End:
    """One worker: its Links, and an engine that answers LinkOpened at once when `works`."""

    def __init__(self, works: bool = True) -> None:
        self.works = works
        self.told: asyncio.Queue[LinkMessage] = asyncio.Queue()
        self.links = Links(self._tell)
        self.endpoint = ""

    def _tell(self, message: LinkMessage) -> None:
        self.told.put_nowait(message)
        if self.works and isinstance(message, LinkOpened):
            reply = LinkEstablished(message.peer, message.epoch)
            asyncio.get_running_loop().call_soon(self.links.on_engine, reply)

    async def heard(self) -> LinkMessage:
        return await asyncio.wait_for(self.told.get(), 5)


@asynccontextmanager
async def worker(name: str, *, works: bool = True, hello: Hello = HELLO) -> AsyncIterator[End]:
    end = End(works)
    service = (kv_pb2_grpc.add_LinkServiceServicer_to_server, end.links, "pdserve.v1.LinkService")
    async with GrpcServer(ServiceSettings(), [service]) as server:
        end.endpoint = server.endpoint
        end.links.start(replace(hello, worker_id=name))
        try:
            yield end
        finally:
            await end.links.close()


async def test_a_link_opens_once_carries_control_both_ways_and_ends_on_both_sides() -> None:
    async with worker("a") as a, worker("b") as b:
        assert await asyncio.gather(*(a.links.open(b.endpoint, "b") for _ in range(3))) == ["gloo"] * 3
        assert await a.heard() == LinkOpened("b", 1, True, "gloo") and await b.heard() == LinkOpened(
            "a", 1, False, "gloo"
        )
        a.links.on_engine(LinkControl("b", 1, StoreSet("k", b"v")))
        assert await b.heard() == LinkControl("a", 1, StoreSet("k", b"v"))
        b.links.on_engine(LinkControl("a", 1, Grant("t", 1, 16)))
        assert await a.heard() == LinkControl("b", 1, Grant("t", 1, 16))
        assert a.links.is_up("b") and b.links.is_up("a")
        b.links.on_engine(LinkClosed("a", 1, "frame timeout"))
        assert await b.heard() == LinkClosed("a", 1, "frame timeout")
        closed = await a.heard()
        assert isinstance(closed, LinkClosed) and closed.epoch == 1 and not a.links.is_up("b")
        assert await a.links.open(b.endpoint, "b") == "gloo"
        assert await a.heard() == LinkOpened("b", 2, True, "gloo")


async def test_both_may_open_at_once() -> None:
    async with worker("a") as a, worker("b") as b:
        opened = await asyncio.gather(a.links.open(b.endpoint, "b"), b.links.open(a.endpoint, "a"))
        assert opened == ["gloo", "gloo"] and a.links.is_up("b") and b.links.is_up("a")


async def test_different_layouts_are_refused_with_both_in_the_message() -> None:
    other = replace(HELLO, layout=replace(LAYOUT, dtype="bfloat16"))
    async with worker("a") as a, worker("b", hello=other) as b:
        with pytest.raises(LayoutMismatch, match=r"bfloat16.*float32"):
            await a.links.open(b.endpoint, "b")
        assert a.told.empty() and b.told.empty()


async def test_versions_identities_and_dead_endpoints_are_checked() -> None:
    async with AsyncExitStack() as scope:
        a = await scope.enter_async_context(worker("a"))
        b = await scope.enter_async_context(worker("b", hello=replace(HELLO, protocol_min=5, protocol_max=6)))
        with pytest.raises(RpcError, match="no common protocol version"):
            await a.links.open(b.endpoint, "b")
        with pytest.raises(Unavailable, match="is worker c, not b"):
            c = await scope.enter_async_context(worker("c"))
            await a.links.open(c.endpoint, "b")
        with pytest.raises(Unavailable):
            await asyncio.wait_for(a.links.open("127.0.0.1:1", "d"), 5)


async def test_a_data_half_that_never_comes_up_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "OPEN_DEADLINE", 0.2)
    async with worker("a", works=False) as a, worker("b", works=False) as b:
        with pytest.raises(Unavailable, match=r"not up within 0.2 s"):
            await a.links.open(b.endpoint, "b")


async def test_whoever_needs_a_link_hears_of_its_end_and_opens_it_again() -> None:
    """What a prefill does for as long as its call lives: its engine may not have had the ticket yet."""
    async with worker("a") as a, worker("b") as b:
        await a.links.open(b.endpoint, "b")
        ended = asyncio.create_task(a.links.ended("b"))
        a.links.on_engine(LinkClosed("b", 1, "idle"))
        async with asyncio.timeout(10):
            await ended
            await a.links.open(b.endpoint, "b")
            assert a.links.is_up("b")
            await a.links.ended("nobody")


async def test_silence_ends_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "LEASE", 0.2)
    monkeypatch.setattr(stream_module, "HEARTBEAT_INTERVAL", 0.05)
    async with worker("a") as a, worker("b") as b:
        await a.links.open(b.endpoint, "b")
        await a.heard()
        with pytest.raises(TimeoutError):  # heartbeats keep it up
            await asyncio.wait_for(a.told.get(), 0.5)
        monkeypatch.setattr(stream_module, "HEARTBEAT_INTERVAL", 10.0)
        closed = await a.heard()
        assert isinstance(closed, LinkClosed) and not a.links.is_up("b")


async def test_a_restarted_peer_replaces_the_old_link() -> None:
    async with worker("b") as b, worker("a") as first:
        await first.links.open(b.endpoint, "b")
        assert await b.heard() == LinkOpened("a", 1, False, "gloo")
        async with worker("a", hello=replace(HELLO, incarnation="2")) as second:
            await second.links.open(b.endpoint, "b")
            closed = await b.heard()
            assert isinstance(closed, LinkClosed) and closed.epoch == 1 and "restart" in closed.reason
            assert await b.heard() == LinkOpened("a", 2, False, "gloo")
            assert b.links.is_up("a")


async def test_a_link_that_was_idle_closes_quietly_and_the_next_request_opens_it_again() -> None:
    """Even one that comes while the old link is still on its way out."""
    async with worker("a") as a, worker("b") as b:
        await a.links.open(b.endpoint, "b")
        with capture_logs() as logs:
            a.links.on_engine(LinkClosed("b", 1, "idle, closed to make room for another link"))
            assert not a.links.is_up("b")
            opened = await asyncio.gather(*(a.links.open(b.endpoint, "b") for _ in range(3)))
        assert opened == ["gloo"] * 3 and a.links.is_up("b") and a.links.path_of("b") == "loopback"
        assert [await a.heard() for _ in range(3)] == [
            LinkOpened("b", 1, True, "gloo"),
            LinkClosed("b", 1, "idle, closed to make room for another link"),
            LinkOpened("b", 2, True, "gloo"),
        ]
        assert {entry["log_level"] for entry in logs} == {"info"}


async def test_the_one_that_was_dialled_may_close_an_idle_link_too() -> None:
    async with worker("a") as a, worker("b") as b:
        await a.links.open(b.endpoint, "b")
        b.links.on_engine(LinkClosed("a", 1, "idle, closed to make room for another link"))
        assert await b.links.open(a.endpoint, "a") == "gloo"
        assert b.links.is_up("a") and a.links.is_up("b")


async def test_a_path_that_is_not_the_one_to_expect_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends have RDMA devices, say so in their hellos, and are linked over sockets."""
    monkeypatch.setattr(links_module, "local_facts", lambda device: Facts(rdma_devices=("mlx5_0",)))
    with capture_logs() as logs:
        async with worker("a") as a, worker("b", hello=replace(HELLO, node="far")) as b:
            await a.links.open(b.endpoint, "b")
            assert a.links.path_of("b") == b.links.path_of("a") == "sockets" and a.links.path_of("c") == ""
    degraded = [entry for entry in logs if entry["event"] == "link_degraded"]
    assert len(degraded) == 2 and all("(mlx5_0; mlx5_0)" in entry["reason"] for entry in degraded)
    assert [entry["path"] for entry in logs if entry["event"] == "link_established"] == ["sockets", "sockets"]


HERE, THERE = "cuda:0 (11-aa)", "cuda:0 (22-bb)"  # each worker's first GPU, by UUID


@pytest.mark.parametrize(
    ("ours", "theirs", "chosen"),
    [
        (("auto", "cpu", "x"), ("auto", "cpu", "x"), "gloo"),
        (("auto", "cpu", "x"), ("auto", "cpu", "y"), "gloo"),
        (("auto", HERE, "x"), ("auto", THERE, "x"), "nccl"),
        (("auto", HERE, "x"), ("auto", THERE, "y"), "nccl"),
        (("auto", HERE, "x"), ("auto", "cuda:1 (11-aa)", "x"), "cuda-ipc"),
        (("auto", HERE, "x"), ("auto", HERE, "y"), "gloo"),  # two containers on one GPU
        (("auto", "cuda:0", "x"), ("auto", "cuda:0", "x"), "cuda-ipc"),
        (("auto", "cuda:0", "x"), ("auto", "cuda:0", "y"), "nccl"),
        (("auto", HERE, "x"), ("auto", "cpu", "x"), "gloo"),
        (("auto", HERE, "x"), ("gloo", THERE, "x"), "gloo"),
        (("gloo", HERE, "x"), ("auto", HERE, "x"), "gloo"),
        (("cuda-ipc", HERE, "x"), ("auto", HERE, "x"), "cuda-ipc"),
        (("nccl", HERE, "x"), ("nccl", THERE, "y"), "nccl"),
        (("nccl", HERE, "x"), ("gloo", THERE, "x"), "contradict: nccl here, gloo there"),
        (("nccl", HERE, "x"), ("auto", "cpu", "x"), rf"nccl needs two GPUs.*{HERE[:6]}.*cpu on x"),
        (("auto", HERE, "x"), ("nccl", HERE, "x"), r"nccl needs two GPUs.*11-aa.*11-aa"),
        (("cuda-ipc", HERE, "x"), ("auto", THERE, "x"), r"cuda-ipc needs two workers on one GPU.*11-aa.*22-bb"),
        (("cuda-ipc", HERE, "x"), ("auto", HERE, "y"), r"one GPU of one node.* on x and .* on y"),
        (("auto", "cpu", "x"), ("rdma", "cpu", "x"), "rdma needs another version"),
    ],
)
def test_the_transport_follows_settings_and_devices(
    ours: tuple[str, str, str], theirs: tuple[str, str, str], chosen: str
) -> None:
    """What cannot work is refused, with both devices named."""

    def hello(facts: tuple[str, str, str]) -> Hello:
        return replace(HELLO, transport=facts[0], device=facts[1], node=facts[2])

    if " " in chosen or ".*" in chosen:
        with pytest.raises(RpcError, match=chosen):
            choose_transport(hello(ours), hello(theirs))
    else:
        transport, reason = choose_transport(hello(ours), hello(theirs))
        assert transport == chosen
        assert (reason == "set") is not (ours[0] == theirs[0] == "auto")
