"""A router's session with a prefill worker, by hand; every wait has a deadline."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

import grpc.aio

from pdserve.core.errors import PdserveError
from pdserve.core.sampling import SamplingParams
from pdserve.core.sequence import SequenceSpec
from pdserve.rpc.convert import spec_to_proto
from pdserve.rpc.errors import error_from_status
from pdserve.rpc.versions import our_versions
from pdserve.v1 import decode_pb2, prefill_pb2, prefill_pb2_grpc, sequence_pb2

PATIENCE = 20.0  # seconds


def spec(tokens: Iterable[int], max_tokens: int = 1, **options: Any) -> sequence_pb2.SequenceSpec:
    """A prompt, and how many tokens may follow on it."""
    ids = tuple(tokens)
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=max_tokens, ignore_eos=True)
    return spec_to_proto(SequenceSpec("r", ids, len(ids), params, **options))


class HandSession:
    """What comes is kept by attempt, so that each can be heard by itself."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = prefill_pb2_grpc.PrefillServiceStub(channel).PrefillSession()
        self.order: list[tuple[str, str, int]] = []  # kind, ticket and attempt of all that came
        self._heard: defaultdict[tuple[str, int], deque[Any]] = defaultdict(deque)

    async def open(self) -> decode_pb2.SessionWelcome:
        await self.send(hello=decode_pb2.SessionHello(protocol=our_versions(), router_id="by hand"))
        async with asyncio.timeout(PATIENCE):
            answer = await self.call.read()
        assert isinstance(answer, prefill_pb2.PrefillSessionResponse)
        return answer.welcome

    async def send(self, **command: Any) -> None:
        await self.call.write(prefill_pb2.PrefillSessionRequest(**command))

    async def prefill(self, ticket: str, sequence: sequence_pb2.SequenceSpec, attempt: int = 1, **more: Any) -> None:
        request = prefill_pb2.PrefillRequest(ticket=ticket, attempt=attempt, sequence=sequence, **more)
        await self.send(prefill=request)

    async def cancel(self, ticket: str, attempt: int = 1) -> None:
        await self.send(cancel=prefill_pb2.PrefillCancel(ticket=ticket, attempt=attempt))

    async def hear(self, ticket: str, attempt: int = 1) -> Any:
        """The attempt's next event. Raises what a PrefillFailed stands for."""
        mine = self._heard[ticket, attempt]
        async with asyncio.timeout(PATIENCE):
            while not mine:
                await self._read()
        event = mine.popleft()
        if isinstance(event, prefill_pb2.PrefillFailed):
            raise error_from_status(event.status)
        return event

    async def first_token(self, ticket: str, attempt: int = 1) -> int:
        """Hear of an attempt up to its first token."""
        assert isinstance(await self.hear(ticket, attempt), prefill_pb2.PrefillAccepted)
        first = await self.hear(ticket, attempt)
        assert isinstance(first, prefill_pb2.FirstToken)
        return first.token.token.id

    async def failure(self, ticket: str, attempt: int = 1) -> PdserveError:
        """What the attempt comes to, whatever comes before."""
        while True:
            try:
                await self.hear(ticket, attempt)
            except PdserveError as error:
                return error

    async def _read(self) -> None:
        response = await self.call.read()
        if not isinstance(response, prefill_pb2.PrefillSessionResponse):
            raise AssertionError("the session ended")
        kind = str(response.WhichOneof("event"))
        event = getattr(response, kind)
        ticket = event.token.ticket if kind == "first_token" else event.ticket
        self.order.append((kind, ticket, event.attempt))
        self._heard[ticket, event.attempt].append(event)
