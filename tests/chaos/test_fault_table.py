"""The contract's table of faults on links, row by row: event, seen by, within, then.

What is seen inside one process is tested with hubs alone in tests/integration/test_links.py, heartbeats with fronts
alone in tests/unit/worker/test_links.py; ROWS names all of them. Here engines are real processes. Bounds leave room for
a loaded machine, but stay below the next coarser one (1 s, frame deadline 2 s, lease 5 s).
"""

from __future__ import annotations

import ast
import asyncio
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec import structs

from pdserve.core.sequence import EndReason
from pdserve.engine.outputs import Ended, TokenOut
from pdserve.transfer.messages import Announce, Commit, ControlMessage, Grant
from pdserve.worker import messages as m
from tests.chaos.engines import PATIENCE, TOKEN_BYTES, Cable, Engine, Event, Fabric, engine_settings
from tests.chaos.lifecycles import Prompt, references
from tests.integration.suites import prompt
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

HERE = "tests/chaos/test_fault_table.py"
LINKS = "tests/integration/test_links.py"
FRONTS = "tests/unit/worker/test_links.py"
ROWS = {
    "peer process dies": [
        (LINKS, "test_a_killed_sender_is_noticed_within_a_second"),
        (HERE, "test_a_prefill_engine_dies_in_a_transfer"),
        (HERE, "test_a_decode_engine_dies_in_a_transfer"),
    ],
    "peer stops or is cut off": [
        (FRONTS, "test_silence_ends_a_link"),
        (LINKS, "test_a_frame_that_does_not_come_ends_the_link"),
        (HERE, "test_a_prefill_engine_stops_with_a_frame_in_flight"),
        (HERE, "test_a_decode_engine_stops_with_a_frame_in_flight"),
    ],
    "control dead, data alive, or the reverse": [
        (FRONTS, "test_silence_ends_a_link"),
        (FRONTS, "test_a_link_opens_once_carries_control_both_ways_and_ends_on_both_sides"),
        (LINKS, "test_a_closed_link_fails_its_attempts_at_once"),
        (LINKS, "test_a_frame_beyond_the_credit_ends_the_link"),
        (HERE, "test_control_ends_on_one_side_only"),
        (HERE, "test_data_ends_while_control_lives"),
    ],
    "ticket cancelled": [
        (LINKS, "test_revoked_pages_are_quiet"),
        (LINKS, "test_a_stopped_send_reads_no_more"),
        (HERE, "test_decode_pages_of_a_cancelled_ticket_are_free_though_the_peer_stands_still"),
        (HERE, "test_prefill_pages_of_a_cancelled_ticket_are_free_at_the_frame_deadline"),
    ],
    "checksum wrong": [
        (LINKS, "test_a_damaged_frame_fails_its_attempt_alone"),
        (HERE, "test_a_damaged_frame_fails_its_attempt_and_the_next_one_succeeds"),
    ],
}
AT_ONCE = 1.0  # seconds
FRAME_DEADLINE, LEASE = 2.0, 5.0
LENGTH = 150


class Bench:
    """Two prefill engines and a decode engine, all linked; tickets that get stuck, and ones that must not."""

    def __init__(self, fabric: Fabric, requests: list[Prompt]) -> None:
        self.fabric, self._requests = fabric, requests
        self._kept: defaultdict[str, list[tuple[str, Event]]] = defaultdict(list)
        self.p0, self.p1, self.d0 = (fabric[name] for name in ("p0", "p1", "d0"))

    async def relink(self) -> None:
        """All engines alive, with new links that nobody taps."""
        for engine in (self.p0, self.p1, self.d0):
            if not engine.alive:
                await engine.start()
        for prefill in ("p0", "p1"):
            await (await self.fabric.link(prefill, "d0")).quiet()

    @property
    def cable(self) -> Cable:
        return self.fabric.cable("p0", "d0")

    def reserve(self, peer: str = "p0") -> tuple[str, Prompt]:
        """A reservation, for which nobody computes yet."""
        request = self._requests.pop()
        ticket = f"t{len(self._requests)}"
        self.fabric.inbox(ticket)
        self.d0.send(m.Reserve(ticket, 1, request.spec(), peer))
        return ticket, request

    def begin(self, peer: str = "p0") -> tuple[str, Prompt]:
        ticket, request = self.reserve(peer)
        self.fabric[peer].send(m.StartPrefill(ticket, 1, request.spec(), "d0"))
        return ticket, request

    async def granted(self) -> str:
        """A reservation that p0 was told of. The link is about to end."""
        passed = asyncio.Event()

        def tap(source: Engine, message: ControlMessage) -> ControlMessage:
            if isinstance(message, Grant):
                passed.set()
            return message

        self.cable.tap, self.cable.doomed = tap, True
        ticket, _ = self.reserve()
        async with asyncio.timeout(PATIENCE):
            await passed.wait()
        return ticket

    async def until(self, ticket: str, of: Engine, wanted: Callable[[Event], bool], timeout: float = PATIENCE) -> Event:
        """The next event of an engine about a ticket that is wanted; those of others are kept for later."""
        kept, inbox = self._kept[ticket], self.fabric.inbox(ticket)
        async with asyncio.timeout(timeout):
            while True:
                for index, (name, event) in enumerate(kept):
                    if name == of.name and wanted(event):
                        del kept[index]
                        return event
                kept.append(await inbox.get())

    async def ended(self, ticket: str, of: Engine) -> EndReason:
        event = await self.until(ticket, of, lambda event: isinstance(event, Ended))
        assert isinstance(event, Ended)
        return event.reason

    async def failed(self, ticket: str) -> str:
        """Why the decode engine gave an attempt up."""
        event = await self.until(ticket, self.d0, lambda event: isinstance(event, m.AttemptFailed))
        assert isinstance(event, m.AttemptFailed)
        return event.reason

    async def answer(self, ticket: str, request: Prompt) -> None:
        """The rest of a ticket's answer is right, and it ends in the decode engine."""
        assert await self.ended(ticket, self.d0) is EndReason.LENGTH
        told = [event for name, event in self._kept[ticket] if name == "d0" and isinstance(event, TokenOut)]
        assert [out.token for out in told] == list(request.answer[1:])

    async def serve(self, peer: str) -> None:
        """One undisturbed ticket."""
        await self.answer(*self.begin(peer))

    async def rearm(self, ticket: str, request: Prompt, peer: str) -> None:
        """Another attempt brings the ticket to its end."""
        self.d0.send(m.Rearm(ticket, 2, request.spec(), peer))
        await self.until(ticket, self.d0, lambda event: isinstance(event, m.Rearmed))
        self.fabric[peer].send(m.StartPrefill(ticket, 2, request.spec(), "d0"))
        await self.answer(ticket, request)

    async def stuck(self, stop: Callable[[], None], tell: bool) -> tuple[str, Prompt]:
        """A ticket between p0 and d0, right after `stop` was called at the announcement of its first frame. `tell`:
        whether announcements and the commit pass. The link is about to end."""
        announced = asyncio.Event()

        def tap(source: Engine, message: ControlMessage) -> ControlMessage | None:
            if source is not self.p0 or not isinstance(message, Announce | Commit) or not message.ticket:
                return message
            if not announced.is_set():
                stop()
                announced.set()
            return message if tell else None

        self.cable.tap = tap
        for cable in self.fabric.cables.values():  # the other one may have a frame of its probe in flight
            cable.doomed = True
        ticket, request = self.begin()
        async with asyncio.timeout(PATIENCE):
            await announced.wait()
        return ticket, request


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fabric(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fabric]:
    model = make_tiny_model(tmp_path_factory.mktemp("table") / "model")
    roles = {"p0": "prefill", "p1": "prefill", "d0": "decode"}
    options = {"enable_prefix_caching": False, "kv_checksum": True, "frame_timeout": FRAME_DEADLINE}
    async with Fabric(**{name: engine_settings(model, role, **options) for name, role in roles.items()}) as fabric:
        yield fabric


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def requests(fabric: Fabric) -> list[Prompt]:
    return await references(fabric, fabric["d0"], [tuple(prompt(LENGTH, seed)) for seed in range(40)])


@pytest_asyncio.fixture(loop_scope="module")
async def bench(fabric: Fabric, requests: list[Prompt]) -> AsyncIterator[Bench]:
    """Fresh links; in the end nothing is owed, and all that ended did so once."""
    bench = Bench(fabric, requests)
    await bench.relink()
    yield bench
    for engine in fabric.engines.values():
        engine.thaw()
        for ticket in bench._kept:  # what a failed test left
            engine.send(m.CancelTicket(ticket))
    await fabric.check_idle()
    fabric.check_ends()


async def test_every_row_has_tests_that_exist() -> None:
    """The tests that ROWS names are there."""
    root = Path(__file__).parents[2]
    for file in {file for row in ROWS.values() for file, _ in row}:
        body = ast.parse((root / file).read_text()).body
        names = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert {name for row in ROWS.values() for where, name in row if where == file} <= names


async def test_a_prefill_engine_dies_in_a_transfer(bench: Bench) -> None:
    """Its attempt fails within 1 s, and another engine's brings the same tokens into the same reservation."""
    ticket, request = await bench.stuck(lambda: bench.p0.signal(signal.SIGKILL, deadly=True), tell=True)
    began = time.monotonic()
    await bench.failed(ticket)
    assert time.monotonic() - began < AT_ONCE
    await bench.rearm(ticket, request, "p1")


async def test_a_decode_engine_dies_in_a_transfer(bench: Bench) -> None:
    """The prefill engine's side ends within 1 s, and its pages are free."""
    ticket, _ = await bench.stuck(lambda: bench.d0.signal(signal.SIGKILL, deadly=True), tell=True)
    began = time.monotonic()
    assert await bench.ended(ticket, bench.p0) is EndReason.TRANSFER_FAILED
    assert time.monotonic() - began < AT_ONCE


async def test_a_prefill_engine_stops_with_a_frame_in_flight(bench: Bench) -> None:
    """The attempt fails at the frame deadline though the control stream lives; meanwhile another link serves."""
    ticket, request = await bench.stuck(bench.p0.freeze, tell=True)
    began = time.monotonic()
    await bench.serve("p1")
    assert time.monotonic() - began < FRAME_DEADLINE
    await bench.failed(ticket)
    assert AT_ONCE < time.monotonic() - began < LEASE
    assert not bench.fabric.cable("p1", "d0").over.is_set()
    bench.p0.thaw()
    assert await bench.ended(ticket, bench.p0) is EndReason.TRANSFER_FAILED
    await bench.rearm(ticket, request, "p1")


async def test_a_decode_engine_stops_with_a_frame_in_flight(bench: Bench) -> None:
    """The prefill engine gives the ticket up at the frame deadline; the decode engine finds out once it is thawed."""
    ticket, request = await bench.stuck(bench.d0.freeze, tell=True)
    began = time.monotonic()
    assert await bench.ended(ticket, bench.p0) is EndReason.TRANSFER_FAILED
    assert AT_ONCE < time.monotonic() - began < LEASE
    bench.d0.thaw()
    await bench.failed(ticket)
    await bench.relink()
    await bench.rearm(ticket, request, "p1")


@pytest.mark.parametrize("first", ["p0", "d0"])
async def test_control_ends_on_one_side_only(bench: Bench, first: str) -> None:
    """That side ends the data half at once, which the other one sees within 1 s where a frame is in flight."""
    if first == "d0":
        ticket, _ = await bench.stuck(lambda: None, tell=False)  # the frame is being sent, and not received
    else:
        ticket = await bench.granted()  # a frame is being received, and not sent
        bench.cable.deliver(bench.p0, Announce(ticket, 1, 0, 0, 1, 0, 1, TOKEN_BYTES // 2))
    began = time.monotonic()
    bench.cable.end("stream reset", bench.fabric[first])
    if first == "d0":
        assert await bench.ended(ticket, bench.p0) is EndReason.TRANSFER_FAILED
    await bench.failed(ticket)
    assert time.monotonic() - began < AT_ONCE
    bench.d0.send(m.CancelTicket(ticket))
    assert await bench.ended(ticket, bench.d0) is EndReason.CANCELLED


async def test_data_ends_while_control_lives(bench: Bench) -> None:
    """The engine that sees it ends its attempts, its front ends control, and so the other side's fail within 1 s."""
    ticket, _ = await bench.stuck(lambda: None, tell=False)
    began = time.monotonic()
    bench.cable.deliver(bench.p0, Announce(ticket, 1, 0, 0, 1, 0, 1, 1 << 40))
    assert "beyond its credit" in await bench.failed(ticket)
    assert await bench.ended(ticket, bench.p0) is EndReason.TRANSFER_FAILED
    assert time.monotonic() - began < AT_ONCE
    bench.d0.send(m.CancelTicket(ticket))
    assert await bench.ended(ticket, bench.d0) is EndReason.CANCELLED


async def test_decode_pages_of_a_cancelled_ticket_are_free_though_the_peer_stands_still(bench: Bench) -> None:
    """Within 1 s, with a frame in flight whose sender is stopped; the link still ends at that frame's deadline."""
    ticket, _ = await bench.stuck(bench.p0.freeze, tell=True)
    began = time.monotonic()
    bench.d0.send(m.CancelTicket(ticket))
    assert await bench.ended(ticket, bench.d0) is EndReason.CANCELLED
    await bench.d0.settled(idle)
    assert time.monotonic() - began < AT_ONCE
    async with asyncio.timeout(LEASE):
        await bench.cable.over.wait()
    bench.p0.thaw()
    assert await bench.ended(ticket, bench.p0) is EndReason.TRANSFER_FAILED


async def test_prefill_pages_of_a_cancelled_ticket_are_free_at_the_frame_deadline(bench: Bench) -> None:
    """At the latest, with a frame in flight whose receiver is stopped."""
    ticket, _ = await bench.stuck(bench.d0.freeze, tell=True)
    began = time.monotonic()
    bench.p0.send(m.CancelTicket(ticket))
    assert await bench.ended(ticket, bench.p0) is EndReason.CANCELLED
    await bench.p0.settled(idle)
    assert time.monotonic() - began < LEASE
    async with asyncio.timeout(LEASE):
        await bench.cable.over.wait()
    bench.d0.thaw()
    await bench.failed(ticket)
    bench.d0.send(m.CancelTicket(ticket))
    assert await bench.ended(ticket, bench.d0) is EndReason.CANCELLED


async def test_a_damaged_frame_fails_its_attempt_and_the_next_one_succeeds(bench: Bench) -> None:
    """At once, with the reason; both links stay up, and the retry's tokens are right."""

    def damage(source: Engine, message: ControlMessage) -> ControlMessage:
        if isinstance(message, Announce) and message.ticket and message.attempt == 1:
            assert message.checksum is not None
            return structs.replace(message, checksum=message.checksum ^ 1)
        return message

    bench.cable.tap = damage
    ticket, request = bench.begin()
    assert "checksum" in await bench.failed(ticket)
    assert await bench.ended(ticket, bench.p0) is EndReason.TRANSFER_FAILED
    await bench.rearm(ticket, request, "p0")
    await bench.serve("p1")
    assert not bench.cable.over.is_set()


def idle(engine: Engine) -> bool:
    return engine.load is not None and engine.load.owned_blocks + engine.load.reserved_blocks == 0
