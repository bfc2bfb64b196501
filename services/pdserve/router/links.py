"""Opens the KV link of each pair of workers as soon as the view pairs them, so that no request pays for it."""

from __future__ import annotations

import asyncio

import grpc.aio
import structlog

from pdserve.policy.fleet import Role
from pdserve.router.fleet import Fleet
from pdserve.router.worker import Worker
from pdserve.rpc.errors import error_from_call
from pdserve.v1 import worker_pb2, worker_pb2_grpc

log = structlog.get_logger(__name__)

OPEN_TIMEOUT = 30.0  # seconds; NCCL's first handshake takes some
RETRY_FIRST = 1.0  # seconds after a failure; doubles. A request may still make the workers open the link themselves.
RETRY_MAX = 30.0

Pair = tuple[str, str]


class Links:
    """Scope of the tasks that open links. A pair is (incarnation, incarnation): a restart makes it a new one."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._open: set[Pair] = set()
        self._failures: dict[Pair, int] = {}
        self._tasks: dict[Pair, asyncio.Task[None]] = {}
        fleet.on_membership.append(self.open_missing)

    async def __aenter__(self) -> Links:
        self.open_missing()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._fleet.on_membership.remove(self.open_missing)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def open_missing(self) -> None:
        """Start a task for each pair without a link. Called when workers come and go."""
        pairs = self._pairs()
        self._open &= pairs.keys()
        self._failures = {pair: count for pair, count in self._failures.items() if pair in pairs}
        for pair, (prefill, decode) in pairs.items():
            if pair not in self._open and pair not in self._tasks:
                task = asyncio.create_task(self._open_link(pair, prefill, decode), name="open link")
                self._tasks[pair] = task

    def _pairs(self) -> dict[Pair, tuple[Worker, Worker]]:
        """Connected prefill and decode workers that could hand KV to each other."""
        up = [worker for worker in self._fleet.workers if worker.connected and not worker.draining and worker.snapshot]
        return {
            (prefill.snapshot.incarnation, decode.snapshot.incarnation): (prefill, decode)
            for prefill in up
            for decode in up
            if prefill.role is Role.PREFILL and decode.role is Role.DECODE and prefill.layout == decode.layout
            if prefill.snapshot and decode.snapshot
        }

    async def _open_link(self, pair: Pair, prefill: Worker, decode: Worker) -> None:
        names = {"prefill": prefill.worker_id, "decode": decode.worker_id}
        try:
            if failures := self._failures.get(pair, 0):
                await self._fleet.wait_membership(min(RETRY_MAX, RETRY_FIRST * 2.0 ** (failures - 1)))
            if prefill.channel is None or decode.snapshot is None or pair not in self._pairs():
                return
            request = worker_pb2.OpenLinkRequest(endpoint=decode.snapshot.endpoint, worker_id=decode.worker_id)
            call = worker_pb2_grpc.WorkerServiceStub(prefill.channel).OpenLink(request, timeout=OPEN_TIMEOUT)
            try:
                answer = await call
            finally:
                call.cancel()
            self._open.add(pair)
            log.info("link_open", transport=answer.transport, **names)
        except grpc.aio.AioRpcError as error:
            self._failures[pair] = self._failures.get(pair, 0) + 1
            log.warning("link_failed", error=str(error_from_call(error)), failures=self._failures[pair], **names)
        finally:
            del self._tasks[pair]
        if pair not in self._open:
            asyncio.get_running_loop().call_soon(self.open_missing)
