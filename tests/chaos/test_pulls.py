"""A prefill worker pulls what the decode worker holds of a conversation, instead of computing it again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeVar
from zlib import crc32

import pytest
import pytest_asyncio
from msgspec import structs

from pdserve.core.sampling import SamplingParams
from pdserve.core.sequence import EndReason, SequenceSpec
from pdserve.engine.outputs import Ended, PromptDone, TokenOut
from pdserve.transfer.messages import ControlMessage, Grant
from pdserve.worker import messages as m
from tests.chaos.engines import BLOCK, PATIENCE, TOKEN_BYTES, Engine, Event, Fabric, engine_settings
from tests.integration.suites import prompt
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
LAYERS, WIDE = 8, 8192  # so that computing takes many times as long as pulling, whatever else the machine does
BYTES = TOKEN_BYTES * LAYERS // 2
FIRST, ANSWER = 300, 36
E = TypeVar("E")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fabric(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fabric]:
    model = make_tiny_model(
        tmp_path_factory.mktemp("pulls") / "model", num_hidden_layers=LAYERS, intermediate_size=WIDE
    )
    roles = {"p0": "prefill", "p1": "prefill", "d0": "decode", "lone": "decode"}
    options = {"blocks": 1024, "max_model_len": 768}
    async with Fabric(**{name: engine_settings(model, role, **options) for name, role in roles.items()}) as fabric:
        yield fabric


@pytest_asyncio.fixture(loop_scope="module")
async def talk(fabric: Fabric, request: pytest.FixtureRequest) -> AsyncIterator[Talk]:
    """Fresh links that have measured themselves, and workers that know how fast they compute."""
    talk = Talk(fabric, request.node.name)
    for name in ("p0", "p1"):
        await fabric.link(name, "d0")
        await fabric[name].settled(lambda engine: any(link.bytes_per_second for link in engine.report.links))
        await talk.turn(tuple(prompt(200, seed=crc32((request.node.name + name).encode()))), name, holds=0)
    yield talk
    for engine in fabric.engines.values():
        engine.thaw()
    await fabric.check_idle()
    fabric.check_ends()


class Talk:
    """Turns of conversations, each checked against an engine that does all by itself."""

    def __init__(self, fabric: Fabric, name: str) -> None:
        self.fabric, self._name, self._count = fabric, name, 0

    async def turn(self, tokens: tuple[int, ...], prefill: str, holds: int) -> tuple[tuple[int, ...], PromptDone, int]:
        """The answer, what prefill says of the prompt, and the KV bytes that were pushed."""
        ticket = self.begin(tokens, prefill, holds)
        return await self.finish(ticket, tokens)

    def begin(self, tokens: tuple[int, ...], prefill: str, holds: int) -> str:
        self._count += 1
        ticket = f"{self._name}-{self._count}"
        self.fabric.inbox(ticket)
        spec = _spec(tokens)
        self.fabric["d0"].send(m.Reserve(ticket, 1, spec, prefill))
        self.fabric[prefill].send(m.StartPrefill(ticket, 1, spec, "d0", holds))
        return ticket

    async def finish(self, ticket: str, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], PromptDone, int]:
        told = await self.told(ticket, lambda events: sum(isinstance(e, Ended) for e in events) == 2)
        answer = tuple(e.token for e in sorted(_of(told, TokenOut), key=lambda e: e.position))
        assert answer == await self._reference(tokens)
        [done] = [e for e in _of(told, PromptDone)]
        [committed] = _of(told, m.KvCommitted)
        return answer, done, committed.kv_bytes

    async def told(self, ticket: str, until: Callable[[list[Event]], bool]) -> list[Event]:
        """Everything that was said about a ticket, once it is enough."""
        events: list[Event] = []
        async with asyncio.timeout(PATIENCE):
            while not until(events):
                events.append((await self.fabric.inbox(ticket).get())[1])
        return events

    async def _reference(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        self._count += 1
        ticket = f"{self._name}-reference-{self._count}"
        self.fabric.inbox(ticket)
        self.fabric["lone"].send(m.Reserve(ticket, 1, _spec(tokens), None))
        told = await self.told(ticket, lambda events: any(isinstance(e, Ended) for e in events))
        return tuple(e.token for e in _of(told, TokenOut))


async def test_earlier_turns_are_pulled_and_only_new_tokens_travel(talk: Talk) -> None:
    """A prefill worker that never saw a conversation has its KV from the decode worker, answers included."""
    first = tuple(prompt(FIRST, seed=5))
    answer, done, pushed = await talk.turn(first, "p0", holds=0)
    assert done.pulled_tokens == done.cached_tokens == 0 and pushed == FIRST * BYTES
    held = (FIRST + ANSWER - 1) // BLOCK * BLOCK  # the last token's KV was never needed
    second = (*first, *answer, *prompt(20, seed=6))
    _, done, pushed = await talk.turn(second, "p1", holds=held)
    assert done.pulled_tokens == done.cached_tokens == held
    assert pushed == (len(second) - held) * BYTES


async def test_a_wrong_guess_costs_nothing(talk: Talk) -> None:
    """Where the decode worker holds nothing after all, its grant says so, and the prompt is computed."""
    _, done, _ = await talk.turn(tuple(prompt(250, seed=8)), "p0", holds=240)
    assert done.pulled_tokens == done.cached_tokens == 0


async def test_what_the_peer_refuses_is_computed(talk: Talk) -> None:
    """A pull that cannot be served (its blocks are not what was granted) is refused with a reason."""
    first = tuple(prompt(FIRST, seed=9))
    answer, _, _ = await talk.turn(first, "p0", holds=0)

    def tamper(source: Engine, message: ControlMessage) -> ControlMessage:
        if isinstance(message, Grant) and message.ticket.endswith("/pull"):
            return structs.replace(message, tokens_end=message.tokens_end + 640)
        return message

    talk.fabric.cable("p1", "d0").tap = tamper
    _, done, _ = await talk.turn((*first, *answer, 3), "p1", holds=FIRST // BLOCK * BLOCK)
    assert done.pulled_tokens == 0


async def test_a_pull_that_takes_too_long_is_given_up(talk: Talk) -> None:
    """The grant of the pull gets lost: its patience runs out, and the prompt is computed."""
    first = tuple(prompt(FIRST, seed=10))
    answer, _, _ = await talk.turn(first, "p0", holds=0)

    def lose(source: Engine, message: ControlMessage) -> ControlMessage | None:
        return None if isinstance(message, Grant) and message.ticket.endswith("/pull") else message

    talk.fabric.cable("p1", "d0").tap = lose
    _, done, _ = await talk.turn((*first, *answer, 3), "p1", holds=FIRST // BLOCK * BLOCK)
    assert done.pulled_tokens == 0


async def test_a_pull_ends_with_its_ticket(talk: Talk) -> None:
    """Cancelled while its pull is under way, a ticket frees all its pages on both sides; the lender's too."""
    first = tuple(prompt(FIRST, seed=11))
    answer, _, _ = await talk.turn(first, "p0", holds=0)
    wanted = asyncio.Event()

    def hold(source: Engine, message: ControlMessage) -> ControlMessage | None:
        if isinstance(message, Grant) and message.ticket.endswith("/pull"):
            wanted.set()
            return None
        return message

    talk.fabric.cable("p1", "d0").tap = hold
    ticket = talk.begin((*first, *answer, 3), "p1", holds=FIRST // BLOCK * BLOCK)
    async with asyncio.timeout(PATIENCE):
        await wanted.wait()
    for name in ("p1", "d0"):  # one after the other: the first to end tells the other side too
        talk.fabric[name].send(m.CancelTicket(ticket))
        told = await talk.told(ticket, lambda events: any(isinstance(e, Ended) for e in events))
        assert [end.reason for end in _of(told, Ended)] == [EndReason.CANCELLED]


async def test_a_link_that_ends_takes_the_pull_and_the_ticket(talk: Talk) -> None:
    """The sender of a ticket whose link is lost while it pulls ends it as TRANSFER_FAILED, pages quiet."""
    first = tuple(prompt(FIRST, seed=12))
    answer, _, _ = await talk.turn(first, "p0", holds=0)
    cable = talk.fabric.cable("p1", "d0")

    def cut(source: Engine, message: ControlMessage) -> ControlMessage | None:
        if isinstance(message, Grant) and message.ticket.endswith("/pull"):
            cable.doomed = True
            cable.end("cut")
        return message

    cable.tap = cut
    ticket = talk.begin((*first, *answer, 3), "p1", holds=FIRST // BLOCK * BLOCK)
    told = await talk.told(ticket, lambda events: any(isinstance(e, Ended) for e in events))
    assert _of(told, Ended)[0].reason is EndReason.TRANSFER_FAILED
    talk.fabric["d0"].send(m.CancelTicket(ticket))
    await talk.told(ticket, lambda events: any(isinstance(e, Ended) for e in events))


def _spec(tokens: tuple[int, ...]) -> SequenceSpec:
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    return SequenceSpec("talk", tokens, len(tokens), params)


def _of(events: list[Event], kind: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]
