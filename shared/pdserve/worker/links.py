"""The control half of KV links: one gRPC stream for each pair of workers, whose life is the link's life.

Control messages go between the two engines as they are; this file opens, greets, keeps alive and ends. A link is known
by the peer's worker id and an epoch that grows with each link of this process.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
import structlog

from pdserve.core.errors import PdserveError, Unavailable
from pdserve.rpc.channel import connect
from pdserve.rpc.convert_link import (
    Hello,
    hello_from_proto,
    hello_to_proto,
)
from pdserve.rpc.errors import RpcError, abort, error_from_call
from pdserve.transfer.messages import TransferReport
from pdserve.transfer.path import Facts, describe_path, local_facts
from pdserve.v1 import kv_pb2, kv_pb2_grpc
from pdserve.worker.greeting import check_hello, choose_transport
from pdserve.worker.link_stream import LinkStream, Read, Write
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

HELLO_DEADLINE = 5.0
OPEN_DEADLINE = 20.0  # seconds for both halves; making a NCCL communicator takes some of them
PROBE_DEADLINE = 100.0  # above twice a probe's own patience: one may have to wait for another


@dataclass(frozen=True, slots=True)
class Probe:
    """What a link is, and what was measured of it."""

    transport: str
    path: str
    degraded: str
    measured: LinkProbed


class Links(kv_pb2_grpc.LinkServiceServicer):
    """All links of one worker: LinkService for those that others open, `open` for our own.

    `start` must be called before either works; `close` ends all. `tell_engine` must not block, and neither must
    `on_report`, which hears of the state of all links a few times a second while it changes. `dial` connects to a peer.
    """

    def __init__(
        self,
        tell_engine: Callable[[LinkMessage], None],
        on_report: Callable[[TransferReport], None] = lambda report: None,
        dial: Callable[[str], grpc.aio.Channel] = connect,
    ) -> None:
        self._tell_engine = tell_engine
        self._on_report = on_report
        self._connect = dial
        self._hello: Hello | None = None
        self._facts = Facts()
        self._epochs = itertools.count(1)
        self._links: dict[str, LinkStream] = {}
        self._dials: dict[str, asyncio.Task[None]] = {}  # until there is a link
        self._dialled: set[asyncio.Task[None]] = set()  # and until it is over
        self._waiters: defaultdict[str, list[asyncio.Future[str]]] = defaultdict(list)

    def start(self, hello: Hello) -> None:
        """From now on links can be made. `hello.transport` is this worker's setting; `rdma_devices` are found here."""
        self._facts = local_facts(hello.device)
        self._hello = replace(hello, rdma_devices=self._facts.rdma_devices)

    def is_up(self, peer: str) -> bool:
        """Whether both halves of the link to `peer` are there."""
        link = self._links.get(peer)
        return link is not None and link.up

    def path_of(self, peer: str) -> str:
        """What carries the bytes of the link to `peer`; empty while it is not up."""
        link = self._links.get(peer)
        return link.path.name if link is not None and link.established else ""

    def degraded_of(self, peer: str) -> str:
        """Why the link to `peer` took a slower path than expected; empty where it did not."""
        link = self._links.get(peer)
        return link.path.degraded if link is not None and link.established else ""

    async def open(self, endpoint: str, peer: str) -> str:
        """Wait until the link to the worker `peer` is up, opening it if nobody has. Returns its transport.

        Raises Unavailable (peer not there, or not within OPEN_DEADLINE), LayoutMismatch, RpcError.
        """
        self._ours()
        try:
            async with asyncio.timeout(OPEN_DEADLINE):
                while (link := self._links.get(peer)) is not None and link.ended.is_set():
                    await link.gone.wait()  # as one that was idle, until this request came
                return link.transport if link is not None and link.up else await self._wait_up(endpoint, peer)
        except TimeoutError:
            raise Unavailable(f"the link to {peer} at {endpoint} was not up within {OPEN_DEADLINE} s") from None

    async def _wait_up(self, endpoint: str, peer: str) -> str:
        """Dial, unless somebody has or a link is coming up, and wait for the outcome."""
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiters[peer].append(future)
        if peer not in self._links and peer not in self._dials:
            # A context of its own: the link outlives the request that happens to need it first.
            dial = asyncio.create_task(
                self._dial(endpoint, peer), name=f"link to {peer}", context=contextvars.Context()
            )
            self._dials[peer] = dial
            self._dialled.add(dial)
            dial.add_done_callback(self._dialled.discard)
        try:
            return await future
        finally:
            self._waiters[peer].remove(future)
            if not self._waiters[peer]:
                del self._waiters[peer]

    async def ended(self, peer: str) -> None:
        """Wait until the link to `peer` that is there now, if there is one, is over."""
        if (link := self._links.get(peer)) is not None:
            await link.gone.wait()

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
                measured = await future
            if not measured.samples:
                raise Unavailable(f"the link to {peer} ended, or took too long for any measurement")
            return Probe(link.transport, link.path.name, link.path.degraded, measured)
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
        if link is None or link.epoch != message.epoch or link.ended.is_set():
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
            case LinkEstablished():
                link.established = True
                self._log_path(link)
                self._settle(link.peer, link.transport)
            case LinkClosed(_, _, reason):
                link.end(reason)
            case LinkOpened() | LinkProbe():
                pass  # only ever sent the other way

    async def close(self) -> None:
        """End every link and every attempt to open one."""
        for link in list(self._links.values()):
            link.end("the worker stops")
        for dial in self._dials.values():
            dial.cancel()
        await asyncio.gather(*self._dialled, return_exceptions=True)
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

    async def _welcome(self, context: grpc.aio.ServicerContext[Any, Any]) -> LinkStream:
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
        failure: PdserveError | None = None
        try:
            async with self._connect(endpoint) as channel:
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
                    del self._dials[peer]
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
            dialling = self._dials.get(peer) is asyncio.current_task()
            if dialling:
                del self._dials[peer]
        crossed = isinstance(failure, RpcError) and failure.code is grpc.StatusCode.ALREADY_EXISTS
        if failure is not None and dialling and peer not in self._links and not crossed:
            if self._waiters.get(peer):
                log.warning("link_failed", peer=peer, endpoint=endpoint, reason=str(failure))
            self._settle(peer, failure)

    def _enter(self, theirs: Hello, transport: str, reason: str, *, initiator: bool) -> LinkStream:
        """A new link is the only one to its peer: what was there before, of this incarnation or another, ends."""
        peer = theirs.worker_id
        old = self._links.pop(peer, None)
        if old is not None:
            again = "again" if old.incarnation == theirs.incarnation else "anew, after a restart"
            old.end(f"{peer} opened the link {again}")
            self._tell_engine(LinkClosed(peer, old.epoch, old.reason))
        path = describe_path(transport, self._ours(), theirs, self._facts)
        link = LinkStream(peer, theirs.incarnation, next(self._epochs), transport, path)
        self._links[peer] = link
        log.info("link_opened", peer=peer, epoch=link.epoch, transport=transport, reason=reason, initiator=initiator)
        self._tell_engine(LinkOpened(peer, link.epoch, initiator, transport))
        return link

    async def _live(self, link: LinkStream, read: Read, write: Write) -> None:
        try:
            await link.carry(read, write, lambda c: self._tell_engine(LinkControl(link.peer, link.epoch, c)))
        finally:
            self._leave(link)

    def _leave(self, link: LinkStream) -> None:
        """Take an ended link out of the books, unless another has its place, and tell. An end is no news to warn of:
        links close where they are idle, and what was on them is told by itself."""
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
            log.info("link_closed", peer=link.peer, epoch=link.epoch, reason=link.reason)
            self._tell_engine(LinkClosed(link.peer, link.epoch, link.reason))
            self._settle(link.peer, Unavailable(f"the link to {link.peer} ended: {link.reason}"))
        link.gone.set()

    def _log_path(self, link: LinkStream) -> None:
        path = link.path
        told = {"peer": link.peer, "epoch": link.epoch, "transport": link.transport, "path": path.name}
        log.info("link_established", **told, **({"path_is": "expected"} if path.expected else {}))
        if path.degraded:
            log.warning("link_degraded", **told, reason=path.degraded)

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
