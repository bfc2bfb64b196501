"""The routers behind this gateway: a client for each, and whether it serves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Container, Iterator, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client import NO_RETRIES, Client, Event, EventStream, GenerateOptions, Prompt, Session
from pdserve.client.exchange import Exchange
from pdserve.client.session import Broken
from pdserve.core.errors import NoCapacity, Unavailable
from pdserve.rpc.access import Access
from pdserve.rpc.channel import connect
from pdserve.rpc.tls import Tls

log = structlog.get_logger(__name__)

SERVICE = "pdserve.v1.InferenceService"
_BACKOFF = 0.2  # seconds between tries to follow a router's health
_CHECK_SECONDS = 2.0
PATIENCE = 3.0  # seconds that a broken answer waits for a router that serves
_SERVING = health_pb2.HealthCheckResponse.SERVING


class Router:
    """One router. `serving` is what its health stream said last; a stream that ended says no."""

    def __init__(self, target: str, tls: Tls | None) -> None:
        self.target = target
        self.serving = False
        self.in_flight = 0
        # Refusals go to the HTTP client with their Retry-After: it knows how long it wants to wait.
        self.client = Client(target, retry=NO_RETRIES, tls=tls)
        self.session = Session(target, tls=tls)
        self._channel = connect(target, Access(tls=tls))
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def close(self) -> None:
        await self.session.close()
        await self.client.close()
        await self._channel.close()

    async def follow(self, changed: asyncio.Event) -> None:
        """Keep `serving` true to the router's health, for ever; `changed` is set at each change."""
        while True:
            call = self._health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), wait_for_ready=True)
            try:
                async for response in call:
                    self._set(response.status == _SERVING, changed)
            except grpc.aio.AioRpcError as error:
                log.debug("router_unreachable", router=self.target, code=error.code().name)
            finally:
                call.cancel()
                self._set(False, changed)
            await asyncio.sleep(_BACKOFF)

    async def check(self) -> bool:
        """Ask now whether it serves; no answer in time means no."""
        call = self._health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=_CHECK_SECONDS)
        try:
            response: health_pb2.HealthCheckResponse = await call
            return bool(response.status == _SERVING)
        except grpc.aio.AioRpcError:
            return False
        finally:
            call.cancel()

    def _set(self, serving: bool, changed: asyncio.Event) -> None:
        if serving != self.serving:
            self.serving = serving
            log.info("router_serves" if serving else "router_lost", router=self.target)
            changed.set()


class Routers:
    """All of them, followed while the scope is open."""

    def __init__(self, targets: Sequence[str], tls: Tls | None = None) -> None:
        """`tls` None: routers are called without it."""
        self._targets, self._tls = targets, tls
        self._routers: list[Router] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._routers = [Router(target, self._tls) for target in self._targets]
        for router in self._routers:
            self._tasks.append(asyncio.create_task(router.follow(self._changed), name=f"health of {router.target}"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for router in self._routers:
            await router.close()

    @contextlib.contextmanager
    def pick(self, api_key: str) -> Iterator[Client]:
        """The client of the router with the fewest of our requests; those that serve come first. It shows `api_key`,
        which is the caller's: a gateway has none of its own."""
        with self._pick() as router:
            yield router.client.with_api_key(api_key)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> EventStream:
        """One answer, as `Session.generate` gives it, of the router that `pick` takes. Where that router goes away,
        another one that serves goes on behind what was shown."""
        return EventStream(self._events(Exchange(prompt, options)))

    async def _events(self, exchange: Exchange) -> AsyncGenerator[Event]:
        clock, timeout = asyncio.get_running_loop().time, exchange.timeout
        began, shown, asked = clock(), 0, set[Router]()  # asked since there was progress
        while True:
            with self._pick(asked) as router:
                try:
                    async with contextlib.aclosing(router.session.events(exchange)) as events:
                        async for event in events:
                            yield event
                    return
                except (Unavailable, NoCapacity) as error:
                    if exchange.shown > shown:
                        shown, asked = exchange.shown, set()
                    asked.add(router)
                    # Before the beginning a refusal is for the caller, who was told nothing yet.
                    moves = shown or isinstance(error, Broken) if exchange.begun else isinstance(error, Unavailable)
                    if not (moves and exchange.repeatable and await self._others(asked, PATIENCE if shown else 0.0)):
                        raise
                    log.warning("answer_moved", request_id=exchange.request.request_id, lost=router.target, shown=shown)
            if timeout is not None:
                exchange.timeout = max(0.0, timeout - (clock() - began))

    async def _others(self, asked: Container[Router], patience: float) -> bool:
        """Whether a router serves that was not `asked`. Of one that came back it takes a moment to hear: up to
        `patience` seconds."""

        def found() -> bool:
            return any(router.serving and router not in asked for router in self._routers)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while not found() and any(router not in asked for router in self._routers):
                    self._changed.clear()
                    await self._changed.wait()
        return found()

    @contextlib.contextmanager
    def _pick(self, but: Container[Router] = ()) -> Iterator[Router]:
        routers = [router for router in self._routers if router not in but] or self._routers
        router = min(routers, key=lambda router: (not router.serving, router.in_flight))
        router.in_flight += 1
        try:
            yield router
        finally:
            router.in_flight -= 1

    def clients(self, api_key: str) -> list[Client]:
        """Every router's client, for what each knows of its own; those that serve come first. They show `api_key`."""
        return [
            router.client.with_api_key(api_key)
            for router in sorted(self._routers, key=lambda router: not router.serving)
        ]

    async def wait_serving(self) -> None:
        """Wait, for as long as it takes, until one of them serves."""
        while not any(router.serving for router in self._routers):
            self._changed.clear()
            await self._changed.wait()

    async def check(self) -> bool:
        """Ask them now: does any serve?"""
        return any(await asyncio.gather(*(router.check() for router in self._routers)))
