"""A running sequence moves from one decode engine to another; whatever breaks, somebody has it, and it whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TypeVar

import pytest
import pytest_asyncio

from pdserve.core.sampling import SamplingParams
from pdserve.core.sequence import EndReason, SequenceSpec
from pdserve.engine.outputs import Ended, TokenOut
from pdserve.transfer.messages import Commit, ControlMessage, Credit
from pdserve.worker import messages as m
from tests.chaos.engines import PATIENCE, Cable, Engine, Event, Fabric, engine_settings
from tests.integration.suites import prompt
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONGEST = 8192
PROMPT = 150
AFTER = 30  # tokens to see of an answer that goes on
E = TypeVar("E")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fabric(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fabric]:
    model = make_tiny_model(tmp_path_factory.mktemp("moves") / "model", max_position_embeddings=LONGEST)
    settings = engine_settings(model, "decode", blocks=2048, max_model_len=LONGEST)
    async with Fabric(d0=settings, d1=settings, lone=settings) as fabric:
        yield fabric


@pytest_asyncio.fixture(loop_scope="module")
async def move(fabric: Fabric, request: pytest.FixtureRequest) -> AsyncIterator[Moving]:
    moving = Moving(fabric, await fabric.link("d0", "d1"), request.node.name)
    yield moving
    moving.cable.tap = None
    for engine, ticket in ((moving.d0, moving.old), (moving.d1, moving.new)):
        engine.send(m.CancelTicket(ticket))
    await fabric.check_idle()
    fabric.check_ends()


class Moving:
    """A sequence that decodes on d0, and its ticket on d1."""

    def __init__(self, fabric: Fabric, cable: Cable, name: str) -> None:
        self.fabric, self.cable, self.d0, self.d1 = fabric, cable, fabric["d0"], fabric["d1"]
        self.old, self.new = f"{name}-old", f"{name}-new"
        self.tokens: list[int] = []
        params = SamplingParams(
            temperature=0.8, seed=5, max_tokens=LONGEST - PROMPT, ignore_eos=True, frequency_penalty=0.2
        )
        # Salted, so that no test finds another one's blocks.
        self.spec = SequenceSpec(name, tuple(prompt(PROMPT)), PROMPT, params, cache_salt=name)
        for ticket in (self.old, self.new):
            fabric.inbox(ticket)

    async def run(self, max_tokens: int | None = None) -> None:
        """Have it decode."""
        if max_tokens is not None:
            self.spec = replace(self.spec, params=replace(self.spec.params, max_tokens=max_tokens))
        self.d0.send(m.Reserve(self.old, 1, self.spec, None))
        await self.more(self.old, 5)

    async def begin(self, tokens: int | None = None) -> None:
        """Reserve what there is on d1, and have d0 send it."""
        given = self.given()[:-1]
        self.d1.send(m.Reserve(self.new, 1, replace(self.spec, token_ids=given), "d0"))
        await self.hear(self.new, m.ReservedPages)
        self.d0.send(m.HandOff(self.old, self.new, 1, "d1", len(given) if tokens is None else tokens))

    async def detached(self) -> None:
        """Hear that d0 has stopped it."""
        detached = await self.hear(self.old, m.Detached)
        assert (detached.new_ticket, detached.tokens) == (self.new, PROMPT + len(self.tokens))

    def rearm(self) -> None:
        """Have the rest come."""
        self.d1.send(m.Rearm(self.new, 2, replace(self.spec, token_ids=self.given()[:-1]), "d0"))

    def given(self) -> tuple[int, ...]:
        return (*self.spec.token_ids, *self.tokens)

    async def more(self, ticket: str, count: int = AFTER) -> None:
        """So many more tokens."""
        until = len(self.tokens) + count
        while len(self.tokens) < until:
            self._note(await self._next(ticket))

    async def hear(self, ticket: str, kind: type[E]) -> E:
        """The next event of that kind; tokens before it are kept."""
        while True:
            event = await self._next(ticket)
            if isinstance(event, kind):
                return event
            self._note(event)

    async def check(self) -> None:
        """The tokens are those of an engine that did all by itself."""
        name = f"{self.old}-reference"
        params = replace(self.spec.params, max_tokens=len(self.tokens))
        inbox = self.fabric.inbox(name)
        self.fabric["lone"].send(m.Reserve(name, 1, replace(self.spec, params=params), None))
        found: list[int] = []
        async with asyncio.timeout(PATIENCE):
            while not isinstance(event := (await inbox.get())[1], Ended):
                found += [event.token] if isinstance(event, TokenOut) else []
        assert self.tokens == found

    def withhold(self, engine: Engine, unwanted: Callable[[ControlMessage], bool]) -> None:
        """Let nothing like that pass, which `engine` says."""
        self.cable.tap = lambda source, message: None if source is engine and unwanted(message) else message

    async def _next(self, ticket: str) -> Event:
        async with asyncio.timeout(PATIENCE):
            return (await self.fabric.inbox(ticket).get())[1]

    def _note(self, event: Event) -> None:
        if isinstance(event, TokenOut):
            assert event.position == PROMPT + len(self.tokens)
            self.tokens.append(event.token)


def _landing(message: ControlMessage) -> bool:
    return isinstance(message, Credit)


async def test_it_goes_on_elsewhere(move: Moving) -> None:
    """Its old ticket ends when the other engine has everything, and no token is missing or computed twice."""
    await move.run()
    done, sent = move.d0.report.handed_off, move.d0.report.handed_off_bytes
    before = (await move.d1.check_integrity()).load
    await move.begin()
    await move.detached()
    move.rearm()
    await move.hear(move.new, m.TicketReady)
    ended = await move.hear(move.old, Ended)
    assert (ended.reason, ended.detail) == (EndReason.HANDED_OFF, "to d1")
    await move.more(move.new)
    await move.d0.settled(lambda d0: d0.report.handed_off == done + 1 and d0.report.handed_off_bytes > sent)
    after = (await move.d1.check_integrity()).load
    assert after.computed_tokens - before.computed_tokens == after.sampled_tokens - before.sampled_tokens > 0
    await move.check()


async def test_a_link_that_ends_while_it_decodes_costs_it_nothing(move: Moving) -> None:
    await move.run()
    move.withhold(move.d1, _landing)
    await move.begin()
    await move.more(move.old)
    move.cable.end("cut")
    failed = await move.hear(move.old, m.HandOffFailed)
    assert (failed.new_ticket, failed.reason) == (move.new, "cut")
    await move.more(move.old)
    await move.check()


async def test_a_link_that_ends_after_it_was_detached_is_waited_for(move: Moving) -> None:
    """What had landed need not be sent again."""
    await move.run()
    await move.begin()
    await move.detached()
    move.cable.end("cut")
    failed = await move.hear(move.new, m.AttemptFailed)
    assert failed.attempt == 1
    move.cable = await move.fabric.link("d0", "d1")
    move.rearm()
    assert (await move.hear(move.new, m.Rearmed)).tokens_held >= PROMPT
    await move.hear(move.new, m.TicketReady)
    assert (await move.hear(move.old, Ended)).reason is EndReason.HANDED_OFF
    await move.more(move.new)
    await move.check()


async def test_a_link_that_ends_with_the_rest_on_its_way_lets_it_go_on_where_it_is(move: Moving) -> None:
    await move.run()
    await move.begin()
    await move.detached()
    on_its_way = asyncio.Event()

    def last(message: ControlMessage) -> bool:
        if isinstance(message, Commit):
            on_its_way.set()
        return on_its_way.is_set()

    move.withhold(move.d0, last)
    move.rearm()
    async with asyncio.timeout(PATIENCE):
        await on_its_way.wait()
    move.cable.end("cut")
    assert (await move.hear(move.old, m.HandOffFailed)).new_ticket == move.new
    await move.more(move.old)
    await move.check()


@pytest.mark.parametrize("late", [False, True])
async def test_a_move_that_is_called_off_lets_it_go_on_where_it_is(move: Moving, late: bool) -> None:
    """Before it was detached, and after; and another move may follow."""
    await move.run()
    if not late:
        move.withhold(move.d1, _landing)
    await move.begin()
    if late:
        await move.detached()
    move.d0.send(m.CallOff(move.old, "another"))  # means nothing
    move.d0.send(m.CallOff(move.old, move.new, "as the test says"))
    assert (await move.hear(move.old, m.HandOffFailed)).reason == "as the test says"
    await move.more(move.old)
    if late:
        move.d1.send(m.CancelTicket(move.new))
        move.new += "-again"
        move.fabric.inbox(move.new)
        await move.begin()
        await move.detached()
        move.rearm()
        await move.hear(move.new, m.TicketReady)
        await move.more(move.new)
    await move.check()


@pytest.mark.parametrize("late", [False, True])
async def test_a_ticket_that_is_cancelled_takes_its_move_with_it(move: Moving, late: bool) -> None:
    await move.run()
    if not late:
        move.withhold(move.d1, _landing)
    await move.begin()
    if late:
        await move.detached()
    move.d0.send(m.CancelTicket(move.old))
    assert (await move.hear(move.old, Ended)).reason is EndReason.CANCELLED
    assert (await move.hear(move.new, m.AttemptFailed)).attempt == 1


async def test_an_answer_that_ends_first_needs_nobody_else(move: Moving) -> None:
    await move.run(max_tokens=400)
    move.withhold(move.d1, _landing)
    await move.begin()
    assert (await move.hear(move.old, Ended)).reason is EndReason.LENGTH
    assert len(move.tokens) == 400
    assert (await move.hear(move.new, m.AttemptFailed)).attempt == 1
    await move.check()


async def test_what_cannot_be_handed_off_is_said(move: Moving) -> None:
    await move.run()
    await move.begin(tokens=LONGEST)
    assert "are to be sent" in (await move.hear(move.old, m.HandOffFailed)).reason
    move.d0.send(m.HandOff(move.old, move.old, 1, "d1", PROMPT))
    assert "is here already" in (await move.hear(move.old, m.HandOffFailed)).reason
    move.withhold(move.d1, _landing)
    for _ in range(2):
        move.d0.send(m.HandOff(move.old, move.new, 1, "d1", PROMPT + 4))
    assert "already" in (await move.hear(move.old, m.HandOffFailed)).reason
    await move.more(move.old)
    await move.check()
