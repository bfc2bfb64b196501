"""One worker as this router follows it: Watch and this router's session, up and down together."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping
from typing import Protocol

import grpc
import grpc.aio
import structlog

from pdserve.core.errors import PdserveError, Unavailable
from pdserve.core.layout import KVLayout
from pdserve.policy.estimate import UNKNOWN, Speed
from pdserve.policy.fleet import LinkFacts, Role, WorkerView
from pdserve.policy.prefix_index import PrefixIndex
from pdserve.router.ledger import Ledger
from pdserve.router.prefill_session import PrefillSession
from pdserve.router.session import DecodeSession
from pdserve.router.tasks import until_first_ends
from pdserve.rpc.access import PLAIN, Access
from pdserve.rpc.channel import CLIENT_OPTIONS, Option, connect
from pdserve.rpc.convert import layout_from_proto, speed_from_proto
from pdserve.rpc.errors import error_from_call, from_server
from pdserve.rpc.versions import our_versions
from pdserve.v1 import worker_pb2, worker_pb2_grpc

log = structlog.get_logger(__name__)

BACKOFF_FIRST = 0.1  # seconds
BACKOFF_MAX = 2.0
BACKOFF_STARTING = 0.3  # the limit for one that never answered: it is probably about to
_ROLES = {worker_pb2.ROLE_PREFILL: Role.PREFILL, worker_pb2.ROLE_DECODE: Role.DECODE}
_SESSIONS: dict[worker_pb2.Role.ValueType, type[DecodeSession | PrefillSession]] = {
    worker_pb2.ROLE_PREFILL: PrefillSession,
    worker_pb2.ROLE_DECODE: DecodeSession,
}


Dial = Callable[[str, float, str], grpc.aio.Channel]
"""How to connect to host:port, so that a peer's silence for so many seconds ends the connection. Last comes the name
that its certificate is for; empty: the host."""


class Listener(Protocol):
    """Who hears of a worker's changes; calls must not block."""

    def changed(self, worker: Worker, membership: bool) -> None:
        """The worker said something; `membership`: it came, went, became another one or started to drain."""

    def touched(self, worker: Worker) -> None:
        """What this router has placed there is another sum."""


class Worker:
    """State of one endpoint. Without a connection `snapshot`, `load` and `links` are the last that was known.

    `reports` counts what the worker told of its load, over all connections.
    """

    def __init__(
        self,
        endpoint: str,
        router_id: str,
        lease: float,
        index: PrefixIndex,
        listener: Listener,
        dial: Dial,
        chance: random.Random,
        name: str = "",
    ) -> None:
        """`lease`, in seconds, is the silence that ends a connection. The worker keeps what it says of its cache in
        `index`, under its endpoint. `chance` draws the pauses between two connections. `name` is what its certificate
        is for; empty: the endpoint's own host."""
        self.endpoint = endpoint
        self.worker_id = ""  # this and its role are the snapshot's
        self.role: Role | None = None
        self.snapshot: worker_pb2.WorkerSnapshot | None = None
        self.load = worker_pb2.WorkerLoad()
        self.links = worker_pb2.LinkTable()
        self.layout: KVLayout | None = None
        self.speed: Speed = UNKNOWN
        self.ledger = Ledger()
        self.connected = False
        self.draining = False
        self.reports = 0
        self._step_since = 0.0  # when the last step that it told of was over, the loop's time
        # When something there last spoke, be it to say that it is not ready; the loop's time.
        self.alive_at = asyncio.get_running_loop().time()
        self.channel: grpc.aio.Channel | None = None
        # One of them, as its role is.
        self.session: DecodeSession | None = None
        self.prefills: PrefillSession | None = None
        self._router_id = router_id
        self._lease = lease
        self._index = index
        self._listener = listener
        self._dial, self._name = dial, name
        self._chance = chance
        self._refused = False
        self._sequence = 0
        self._link_facts: Mapping[str, LinkFacts] = {}
        self._retry_now = asyncio.Event()

    def view(self) -> WorkerView | None:
        """This worker for policies; None while its role or layout is unknown, or not one that requests go to."""
        snapshot, load, ledger, role = self.snapshot, self.load, self.ledger, self.role
        if snapshot is None or role is None or self.layout is None:
            return None
        return WorkerView(
            worker_id=self.worker_id,
            role=role,
            layout=self.layout,
            max_num_seqs=snapshot.max_num_seqs,
            max_num_batched_tokens=snapshot.max_num_batched_tokens,
            total_blocks=snapshot.total_blocks,
            available_blocks=load.free_blocks + load.cached_blocks,
            lookahead_tokens=snapshot.lookahead_tokens,
            watermark_blocks=snapshot.watermark_blocks,
            connected=self.connected,
            draining=self.draining,
            in_flight_blocks=ledger.in_flight_blocks,
            outstanding_tokens=ledger.outstanding_tokens,
            prefill_tokens=ledger.in_flight_tokens,
            prefill_squares=ledger.in_flight_squares,
            sequences=ledger.sequences,
            bounded=ledger.bounded,
            placed=ledger.placed,
            reported_sequences=load.running + load.waiting,
            reported_bounded=load.bounded,
            reported_prefill_tokens=load.pending_prefill_tokens,
            reported_prefill_squares=load.pending_prefill_squares,
            reported_owned_blocks=load.owned_blocks + load.reserved_blocks,
            step_since=self._step_since,
            speed=self.speed,
            node=snapshot.node,
            links=self._link_facts,
        )

    def retry_now(self) -> None:
        """Cut the wait before the next connection short: something hints that the worker is there."""
        self._retry_now.set()

    async def run(self) -> None:
        """Keep a connection up, for ever; the owner cancels it."""
        backoff = BACKOFF_FIRST
        while True:
            reached = False
            try:
                reached = await self._connect()
            except Exception as error:
                log.error("worker_failed", endpoint=self.endpoint, error=repr(error), exc_info=error)
            limit = BACKOFF_MAX if self.snapshot else BACKOFF_STARTING
            backoff = BACKOFF_FIRST if reached else min(limit, 2 * backoff)
            self._retry_now.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff * self._chance.uniform(0.75, 1.25)):
                    await self._retry_now.wait()

    async def _connect(self) -> bool:
        """One connection from its beginning to its end. True when it came up at all."""
        watch: grpc.aio.UnaryStreamCall[worker_pb2.WatchRequest, worker_pb2.WatchResponse] | None = None
        session: DecodeSession | PrefillSession | None = None
        reached, reason = False, "closed"
        hello = worker_pb2.WatchRequest(protocol=our_versions())
        try:
            async with self._dial(self.endpoint, self._lease, self._name) as channel:
                try:
                    watch = worker_pb2_grpc.WorkerServiceStub(channel).Watch(hello)
                    async with asyncio.timeout(self._lease):
                        first = await watch.read()
                    if not isinstance(first, worker_pb2.WatchResponse) or not first.HasField("snapshot"):
                        raise Unavailable("Watch did not begin with a snapshot")
                    if (kind := _SESSIONS.get(first.snapshot.role)) is not None:
                        session = kind(channel, self._router_id, self._lease)
                        await session.open()
                        if session.incarnation != first.snapshot.incarnation:
                            raise Unavailable("the worker restarted between Watch and Session")
                    self.up(first.snapshot, channel, session)
                    reached = True
                    await until_first_ends(self._follow(watch), *([session.run()] if session else []))
                finally:
                    # The view first: whoever hears of a lost ticket must not be sent here again.
                    self.connected, self.channel, self.session, self.prefills = False, None, None, None
                    self._listener.touched(self)
                    if watch is not None:
                        watch.cancel()
                    if session is not None:
                        session.close(f"connection to {self.worker_id} lost")
        except (grpc.aio.AioRpcError, PdserveError, TimeoutError, OSError) as error:
            reason = _say(error)
            if isinstance(error, grpc.aio.AioRpcError) and from_server(error):
                refused = error.code() is grpc.StatusCode.UNAUTHENTICATED
                if refused and not self._refused:  # nothing but other settings will change that, so once
                    log.error("worker_refuses_us", endpoint=self.endpoint, reason=reason)
                self._refused = refused
                if not refused:
                    self.alive_at = asyncio.get_running_loop().time()
        if reached:
            self._refused = False
            # Who said before that it would go has not been lost.
            tell, event = (log.info, "worker_left") if self.draining else (log.warning, "worker_lost")
            tell(event, endpoint=self.endpoint, worker_id=self.worker_id, reason=reason)
            self._listener.changed(self, True)
        else:
            log.debug("worker_unreachable", endpoint=self.endpoint, reason=reason)
            if self.snapshot is None:
                self._listener.changed(self, True)  # who waits for this endpoint may give it up now
        return reached

    def up(
        self,
        snapshot: worker_pb2.WorkerSnapshot,
        channel: grpc.aio.Channel | None,
        session: DecodeSession | PrefillSession | None,
    ) -> None:
        """A connection is there, and this is what the worker said first."""
        self._take_snapshot(snapshot)
        self.ledger = Ledger(lambda: self._listener.touched(self))
        self.channel, self.connected = channel, True
        self.session = session if isinstance(session, DecodeSession) else None
        self.prefills = session if isinstance(session, PrefillSession) else None
        log.info(
            "worker_up",
            endpoint=self.endpoint,
            worker_id=snapshot.worker_id,
            incarnation=snapshot.incarnation,
            role=worker_pb2.Role.Name(snapshot.role),
            model=snapshot.model,
        )
        self._listener.changed(self, True)

    def _take_snapshot(self, snapshot: worker_pb2.WorkerSnapshot) -> None:
        # A prefix cache has no layout of its own; of the others one that cannot be is an error.
        self.layout = layout_from_proto(snapshot.layout) if snapshot.role in _ROLES else None
        self.snapshot, self.draining = snapshot, snapshot.draining
        self.worker_id, self.role = snapshot.worker_id, _ROLES.get(snapshot.role)
        self.load = worker_pb2.WorkerLoad(free_blocks=snapshot.total_blocks)  # until it reports
        self.speed = UNKNOWN
        self._index.drop(self.endpoint)
        self._take_links(worker_pb2.LinkTable())
        self._sequence = 0
        self.reports += 1

    async def _follow(self, watch: grpc.aio.UnaryStreamCall[worker_pb2.WatchRequest, worker_pb2.WatchResponse]) -> None:
        while True:
            # Workers send a delta at least every second, so that silence means that nobody is at work there.
            async with asyncio.timeout(self._lease):
                response = await watch.read()
            if not isinstance(response, worker_pb2.WatchResponse):
                raise Unavailable("the worker ended the Watch stream")
            draining, another = self.draining, response.HasField("snapshot")
            if response.HasField("delta"):
                self.take_delta(response.delta)
            elif another:
                if self.snapshot is not None and response.snapshot.incarnation != self.snapshot.incarnation:
                    raise Unavailable("a new incarnation in the middle of a Watch stream")
                self._take_snapshot(response.snapshot)
            self._listener.changed(self, another or self.draining != draining)

    def take_delta(self, delta: worker_pb2.WorkerDelta) -> None:
        if delta.sequence != self._sequence + 1:
            raise Unavailable(f"Watch went from delta {self._sequence} to {delta.sequence}")
        self._sequence = delta.sequence
        if delta.load.steps != self.load.steps or not self.load.pending_prefill_tokens:
            self._step_since = asyncio.get_running_loop().time()  # its next one begins
        self.load, self.draining = delta.load, delta.draining
        if self.snapshot is not None:
            self.snapshot.draining = delta.draining
        if delta.HasField("links"):
            self._take_links(delta.links)
        self.speed = speed_from_proto(delta.load.speed)
        self.reports += 1
        self.ledger.reported()
        if delta.stored or delta.removed:
            limit = self.snapshot.total_blocks if self.snapshot else 0
            self._index.update(self.endpoint, delta.stored, delta.removed, limit)

    def _take_links(self, table: worker_pb2.LinkTable) -> None:
        self.links = table
        self._link_facts = {link.peer: LinkFacts(link.bytes_per_second, link.path) for link in table.links}


def lease_channel(endpoint: str, lease: float, name: str, access: Access = PLAIN) -> grpc.aio.Channel:
    """A channel whose pings find out within `lease` seconds that nobody is there any more. Its connection is its own,
    so that its end is this worker's end."""
    half = max(50, round(lease * 500))
    ours = {
        "grpc.keepalive_time_ms": half,
        "grpc.keepalive_timeout_ms": half,
    }
    options: list[Option] = [option for option in CLIENT_OPTIONS if option[0] not in ours]
    options += ours.items()
    if name:
        options.append(("grpc.ssl_target_name_override", name))
    return connect(endpoint, access, options)


def _say(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error_from_call(error)}"
    return "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
