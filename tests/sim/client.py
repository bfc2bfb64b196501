"""A simulated client: it asks a router, checks every token as it comes, and goes on elsewhere when a router is lost."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio

from pdserve.v1 import inference_pb2, inference_pb2_grpc
from tests.sim.loop import Process
from tests.sim.model import answer

if TYPE_CHECKING:
    from tests.sim.world import World

AGAIN = 0.05  # seconds until a client asks again where a router refused it
# What a client with a deadline may be told, whatever happened to the fleet meanwhile.
LATE = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)


@dataclass(frozen=True, slots=True)
class Request:
    """What one client wants. Times are seconds: when it asks, its deadline, and when it goes away."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    at: float
    deadline: float | None = None
    leaves: float | None = None
    priority: int = 0
    conversation: str = ""


@dataclass(slots=True)
class Client:
    world: World
    request: Request
    process: Process
    tokens: list[int] = field(default_factory=list)
    outcome: str = ""
    _expected: list[int] = field(default_factory=list)

    async def run(self) -> None:
        """Ask, at its time, until the answer is complete or it gives up."""
        request = self.request
        self._expected = answer(request.prompt, request.max_tokens)
        await asyncio.sleep(request.at)
        asking = asyncio.create_task(self._ask_around(), name=f"client {request.name}")
        await asyncio.wait([asking], timeout=request.leaves)
        if not asking.done():
            asking.cancel()
            self.outcome = "left"
        for result in await asyncio.gather(asking, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        self.world.log(f"client {request.name} {self.outcome} {len(self.tokens)}")

    async def _ask_around(self) -> None:
        world, request = self.world, self.request
        end = None if request.deadline is None else world.loop.time() + request.deadline
        turn = int(request.name) % len(world.routers)
        while not self.outcome:
            router = world.routers[turn % len(world.routers)]
            turn += 1
            remaining = None if end is None else max(0.001, end - world.loop.time())
            try:
                await self._ask(router.endpoint, remaining)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    await asyncio.sleep(AGAIN)  # a router that is gone, or knows no worker yet
                elif end is not None and error.code() in LATE:
                    self.outcome = error.code().name.lower()
                else:
                    raise AssertionError(f"request {request.name} ended as {error.code()}: {error.details()}") from None

    async def _ask(self, endpoint: str, remaining: float | None) -> None:
        wanted = self.request
        request = inference_pb2.GenerateRequest(
            model="tiny", request_id=wanted.name, priority=wanted.priority, session_id=wanted.conversation
        )
        request.token_ids.ids.extend(wanted.prompt)
        request.sampling.temperature = 0.0
        request.sampling.seed = 1
        request.stopping.max_tokens = wanted.max_tokens
        request.resume.ids.extend(self.tokens)
        async with self.world.network.channel(self.process, endpoint) as channel:
            call = inference_pb2_grpc.InferenceServiceStub(cast(Any, channel)).Generate(request, timeout=remaining)
            try:
                async for response in call:
                    self._take(response)
            finally:
                call.cancel()

    def _take(self, response: inference_pb2.GenerateResponse) -> None:
        match response.WhichOneof("event"):
            case "output":
                start = len(self.tokens)
                self.tokens += [token.id for token in response.output.tokens]
                self.world.log(f"client {self.request.name} has {self.tokens[start:]}")
                expected = self._expected[: len(self.tokens)]
                assert self.tokens == expected, f"{self.request}: {self.tokens} instead of {expected}"
            case "finish":
                assert self.tokens == self._expected, f"{self.request} ended after {self.tokens} of {self._expected}"
                self.outcome = "done"
