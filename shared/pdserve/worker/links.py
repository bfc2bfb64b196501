"""The control half of KV links: one gRPC stream for each pair of workers, whose life is the link's life.

Control messages go between the two engines as they are; this file opens, greets, keeps alive and ends. A link is known
by the peer's worker id and an epoch that grows with each link of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio
import structlog

from pdserve.core.errors import PdserveError, Unavailable
from pdserve.rpc.channel import connect
from pdserve.rpc.convert_link import (
    HEARTBEAT,
    Beat,
    Hello,
    control_from_proto,
    control_to_proto,
    hello_from_proto,
    hello_to_proto,
)
from pdserve.rpc.errors import RpcError, abort, error_from_call
from pdserve.rpc.versions import agree
from pdserve.transfer.messages import ControlMessage, TransferReport
from pdserve.v1 import kv_pb2, kv_pb2_grpc
from pdserve.worker.messages import (
    LinkClosed,
    LinkControl,
    LinkEstablished,
    LinkMessage,
    LinkOpened,
    LinkProbe,
    LinkProbed,
    LinkStats,
)

log = structlog.get_logger(__name__)

LEASE = 5.0  # seconds without a sign of life until a peer counts as gone
HEARTBEAT_INTERVAL = LEASE / 5
HELLO_DEADLINE = 5.0
OPEN_DEADLINE = 20.0  # seconds for both halves; making a NCCL communicator takes some of them
PROBE_DEADLINE = 60.0
MAX_OUTBOX = 1 << 16  # control messages; a peer that takes none for a lease is gone anyway

Read = Callable[[], Awaitable[Any]]
Write = Callable[[kv_pb2.LinkMessage], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Probe:
    """What a link is, and what was measured of it."""

    transport: str
    path: str
    degraded: str
    measured: LinkProbed


@dataclass(eq=False, slots=True)
class _Link:
    peer: str
    incarnation: str
    epoch: int
    transport: str
    path: str = ""
    degraded: str = ""
    probe: asyncio.Future[LinkProbed] | None = None
    outbox: asyncio.Queue[ControlMessage] = field(default_factory=lambda: asyncio.Queue(MAX_OUTBOX))
    established: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""

    def end(self, reason: str) -> None:
        """Ask for the end of both halves. The first reason counts."""
        if not self.ended.is_set():
            self.reason = reason
            self.ended.set()


class Links(kv_pb2_grpc.LinkServiceServicer):
    """All links of one worker: LinkService for those that others open, `open` for our own.

    `start` must be called before either works; `close` ends all. `tell_engine` must not block, and neither must
    `on_report`, which hears of the state of all links a few times a second while it changes.
    """

    def __init__(
        self,
        tell_engine: Callable[[LinkMessage], None],
        on_report: Callable[[TransferReport], None] = lambda report: None,
    ) -> None:
        self._tell_engine = tell_engine
        self._on_report = on_report
        self._hello: Hello | None = None
        self._epochs = itertools.count(1)
        self._links: dict[str, _Link] = {}
        self._dials: dict[str, asyncio.Task[None]] = {}
        self._waiters: defaultdict[str, list[asyncio.Future[str]]] = defaultdict(list)

    def start(self, hello: Hello) -> None:
        """From now on links can be made. `hello.transport` is this worker's setting."""
        self._hello = hello

    def is_up(self, peer: str) -> bool:
        """Whether both halves of the link to `peer` are there."""
        link = self._links.get(peer)
        return link is not None and link.established and not link.ended.is_set()

    async def open(self, endpoint: str, peer: str) -> str:
        """Wait until the link to the worker `peer` is up, opening it if nobody has. Returns its transport.

        Raises Unavailable (peer not there, or not within OPEN_DEADLINE), LayoutMismatch, RpcError.
        """
        link = self._links.get(peer)
        if link is not None and link.established and not link.ended.is_set():
            return link.transport
        self._ours()
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiters[peer].append(future)
        if link is None and peer not in self._dials:
            # A context of its own: the link outlives the request that happens to need it first.
            self._dials[peer] = asyncio.create_task(
                self._dial(endpoint, peer), name=f"link to {peer}", context=contextvars.Context()
            )
        try:
            async with asyncio.timeout(OPEN_DEADLINE):
                return await future
        except TimeoutError:
            raise Unavailable(f"the link to {peer} at {endpoint} was not up within {OPEN_DEADLINE} s") from None
        finally:
            self._waiters[peer].remove(future)
            if not self._waiters[peer]:
                del self._waiters[peer]

    async def probe(self, endpoint: str, peer: str, frame_bytes: list[int], bytes_per_size: int) -> Probe:
        """Measure the link to `peer`, opening it where it is missing.

        Raises what `open` does, Unavailable where the link ends meanwhile or PROBE_DEADLINE passes, and RpcError
        (FAILED_PRECONDITION) where another probe of this link is under way.
        """
        await self.open(endpoint, peer)
        link = self._links.get(peer)
        if link is None or link.ended.is_set():
            raise Unavailable(f"the link to {peer} ended")
        if link.probe is not None:
            raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, f"the link to {peer} is being probed already")
        future = link.probe = asyncio.get_running_loop().create_future()
        try:
            self._tell_engine(LinkProbe(peer, link.epoch, frame_bytes, bytes_per_size))
            async with asyncio.timeout(PROBE_DEADLINE):
                return Probe(link.transport, link.path, link.degraded, await future)
        except TimeoutError:
            raise Unavailable(f"probing the link to {peer} took longer than {PROBE_DEADLINE} s") from None
        finally:
            link.probe = None

    def on_engine(self, message: LinkMessage) -> None:
        """Take what the engine says about links. Words about links that are over are dropped."""
        if isinstance(message, LinkStats):
            self._on_report(message.report)
            return
        link = self._links.get(message.peer)
        if link is None or link.epoch != message.epoch:
            return
        match message:
            case LinkControl(_, _, control):
                try:
                    link.outbox.put_nowait(control)
                except asyncio.QueueFull:
                    link.end("the peer takes no control messages")
            case LinkProbed():
                if link.probe is not None and not link.probe.done():
                    link.probe.set_result(message)
            case LinkEstablished(_, _, path, degraded):
                link.established, link.path, link.degraded = True, path, degraded
                log.info("link_established", peer=link.peer, epoch=link.epoch, transport=link.transport, path=path)
                if degraded:
                    log.warning("link_degraded", peer=link.peer, epoch=link.epoch, path=path, reason=degraded)
                self._settle(link.peer, link.transport)
            case LinkClosed(_, _, reason):
                link.end(reason)
            case LinkOpened() | LinkProbe():
                pass  # only ever sent the other way

    async def close(self) -> None:
        """End every link and every attempt to open one."""
        for link in list(self._links.values()):
            link.end("the worker stops")
        dials = list(self._dials.values())
        for dial in dials:
            dial.cancel()
        await asyncio.gather(*dials, return_exceptions=True)
        for peer in list(self._waiters):
            self._settle(peer, Unavailable("the worker stops"))

    async def Link(  # type: ignore[override]  # a coroutine that reads and writes by itself
        self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """A peer opens a link to us."""
        try:
            link = await self._welcome(context)
        except PdserveError as error:
            log.warning("link_refused", reason=str(error))
            await abort(context, error)
        await self._live(link, context.read, lambda message: context.write(kv_pb2.LinkResponse(message=message)))

    async def _welcome(self, context: grpc.aio.ServicerContext[Any, Any]) -> _Link:
        ours = self._ours()
        try:
            async with asyncio.timeout(HELLO_DEADLINE):
                first = await context.read()
        except TimeoutError:
            raise RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, "no hello came") from None
        if not isinstance(first, kv_pb2.LinkRequest):
            raise RpcError(grpc.StatusCode.CANCELLED, "the stream ended before its hello")
        theirs = hello_from_proto(first.message)
        check_hello(ours, theirs)
        # Both may dial at once. The lower id's stream is kept; the other one's dial waits for it.
        if theirs.worker_id in self._dials and theirs.worker_id not in self._links:
            if ours.worker_id < theirs.worker_id:
                raise RpcError(grpc.StatusCode.ALREADY_EXISTS, "this link is being opened from the other side")
            self._dials[theirs.worker_id].cancel()
        transport, reason = choose_transport(ours, theirs)
        await context.write(kv_pb2.LinkResponse(message=hello_to_proto(replace(ours, transport=transport))))
        return self._enter(theirs, transport, reason, initiator=False)

    async def _dial(self, endpoint: str, peer: str) -> None:
        ours = self._ours()
        failure: PdserveError = Unavailable(f"the link to {peer} ended")
        try:
            async with connect(endpoint) as channel:
                stub: kv_pb2_grpc.LinkServiceAsyncStub = kv_pb2_grpc.LinkServiceStub(channel)
                call = stub.Link()
                try:
                    async with asyncio.timeout(HELLO_DEADLINE):
                        await call.write(kv_pb2.LinkRequest(message=hello_to_proto(ours)))
                        answer = await call.read()
                    if not isinstance(answer, kv_pb2.LinkResponse):
                        raise Unavailable(f"{endpoint} ended the link before its hello")
                    theirs = hello_from_proto(answer.message)
                    check_hello(ours, theirs)
                    if theirs.worker_id != peer:
                        raise Unavailable(f"{endpoint} is worker {theirs.worker_id}, not {peer}")
                    link = self._enter(theirs, theirs.transport, "chosen by the peer", initiator=True)
                    await self._live(link, call.read, lambda message: call.write(kv_pb2.LinkRequest(message=message)))
                finally:
                    call.cancel()
        except grpc.aio.AioRpcError as error:
            failure = error_from_call(error)
        except (TimeoutError, asyncio.InvalidStateError):
            failure = Unavailable(f"{endpoint} did not answer the hello")
        except PdserveError as error:
            failure = error
        finally:
            del self._dials[peer]
        crossed = isinstance(failure, RpcError) and failure.code is grpc.StatusCode.ALREADY_EXISTS
        if peer not in self._links and not crossed:
            if self._waiters.get(peer):
                log.warning("link_failed", peer=peer, endpoint=endpoint, reason=str(failure))
            self._settle(peer, failure)

    def _enter(self, theirs: Hello, transport: str, reason: str, *, initiator: bool) -> _Link:
        """A new link is the only one to its peer: what was there before, of this incarnation or another, ends."""
        peer = theirs.worker_id
        old = self._links.pop(peer, None)
        if old is not None:
            again = "again" if old.incarnation == theirs.incarnation else "anew, after a restart"
            old.end(f"{peer} opened the link {again}")
            self._tell_engine(LinkClosed(peer, old.epoch, old.reason))
        link = _Link(peer, theirs.incarnation, next(self._epochs), transport)
        self._links[peer] = link
        log.info("link_opened", peer=peer, epoch=link.epoch, transport=transport, reason=reason, initiator=initiator)
        self._tell_engine(LinkOpened(peer, link.epoch, initiator, transport))
        return link

    async def _live(self, link: _Link, read: Read, write: Write) -> None:
        """Carry control messages both ways until either side, or either half, ends."""
        tasks = [
            asyncio.create_task(self._receive(link, read)),
            asyncio.create_task(self._send(link, write)),
            asyncio.create_task(link.ended.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            link.end("the control stream ended")
            if link.probe is not None and not link.probe.done():
                link.probe.set_exception(Unavailable(f"the link to {link.peer} ended: {link.reason}"))
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception) and not isinstance(outcome, _STREAM_ENDS):
                    log.error("link_error", peer=link.peer, epoch=link.epoch, error=repr(outcome))
            if self._links.get(link.peer) is link:
                del self._links[link.peer]
                log.info("link_closed", peer=link.peer, epoch=link.epoch, reason=link.reason)
                self._tell_engine(LinkClosed(link.peer, link.epoch, link.reason))
                self._settle(link.peer, Unavailable(f"the link to {link.peer} ended: {link.reason}"))

    async def _receive(self, link: _Link, read: Read) -> None:
        while True:
            try:
                async with asyncio.timeout(LEASE):
                    item = await read()
            except TimeoutError:
                link.end(f"no sign of life for {LEASE} s")
                return
            if not isinstance(item, kv_pb2.LinkRequest | kv_pb2.LinkResponse):
                link.end("the peer ended the link")
                return
            try:
                control = control_from_proto(item.message)
            except PdserveError as error:
                link.end(str(error))
                return
            if not isinstance(control, Beat) and not link.ended.is_set():
                self._tell_engine(LinkControl(link.peer, link.epoch, control))

    async def _send(self, link: _Link, write: Write) -> None:
        while True:
            message = HEARTBEAT
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_INTERVAL):
                    message = control_to_proto(await link.outbox.get())
            try:
                async with asyncio.timeout(LEASE):
                    await write(message)
            except TimeoutError:
                link.end(f"the peer took no control message for {LEASE} s")
                return

    def _settle(self, peer: str, outcome: str | PdserveError) -> None:
        """Answer those who wait for the link to `peer`."""
        for future in self._waiters.get(peer, ()):
            if future.done():
                continue
            if isinstance(outcome, str):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)

    def _ours(self) -> Hello:
        if self._hello is None:
            raise Unavailable("the worker is starting")
        return self._hello


# What reading or writing a stream raises once the peer is gone: no news, since the link ends then anyway.
_STREAM_ENDS = (grpc.aio.AioRpcError, grpc.aio.UsageError, grpc.aio.InternalError, asyncio.InvalidStateError, OSError)


def check_hello(ours: Hello, theirs: Hello) -> None:
    """Raise RpcError where no protocol is common, LayoutMismatch (with both layouts) where KV pages differ."""
    agree(theirs.protocol_min, theirs.protocol_max)
    ours.layout.require_same(theirs.layout)
    if theirs.worker_id == ours.worker_id:
        raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, f"two workers have the id {ours.worker_id}")


def _gpu(device: str) -> str:
    """A GPU's UUID, which two processes may know by different numbers; without one, what it is called."""
    return device.partition(" ")[2] or device


def choose_transport(ours: Hello, theirs: Hello) -> tuple[str, str]:
    """The transport for a link and why, from both settings and devices. Raises RpcError where they contradict."""
    wishes = {ours.transport, theirs.transport} - {"auto", ""}
    if len(wishes) > 1:
        message = f"KV transports contradict: {ours.transport} here, {theirs.transport} there"
        raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, message)
    devices = f"{ours.device} on {ours.node} and {theirs.device} on {theirs.node}"
    both_gpus = ours.device.startswith("cuda") and theirs.device.startswith("cuda")
    same_gpu = (ours.node, _gpu(ours.device)) == (theirs.node, _gpu(theirs.device))
    nccl_works = both_gpus and not same_gpu
    if wishes == {"nccl"} and not nccl_works:
        raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, f"nccl needs two GPUs, these are {devices}")
    if wishes:
        return wishes.pop(), "set"
    return ("nccl" if nccl_works else "gloo"), f"auto: {devices}"
