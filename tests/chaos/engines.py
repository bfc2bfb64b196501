"""Real engine processes whose fronts are played by the test: it relays link control, and breaks what it likes.

Everything happens in one event loop. What an engine says about a ticket goes to that ticket's inbox; starts and ends
are counted, so that at the end every start must have had exactly one end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pdserve.engine.outputs import Ended, Load, PromptDone, TokenOut
from pdserve.transfer.messages import ControlMessage, TransferReport
from pdserve.worker import messages as m
from pdserve.worker.engine_client import EngineClient, EngineDied

PATIENCE = 20.0  # seconds after which something that must happen has not
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # of the tiny model: layers, K and V, KV heads, head size, float32
BLOCK = 16
CHUNK = 64


@dataclass(frozen=True, slots=True)
class Died:
    """An engine process is gone, and all its tickets with it."""

    reason: str


Event = m.TicketMessage | TokenOut | Ended | PromptDone | Died
Tap = Callable[["Engine", ControlMessage], ControlMessage | None]


def engine_settings(model: Path, role: str, *, blocks: int = 256, **changes: Any) -> m.EngineSettings:
    """A tiny model in float32, one thread, frames of a layer's chunk and less."""
    values: dict[str, Any] = {
        "role": role, "model": str(model), "dtype": "float32", "device": "cpu", "threads": 1, "cores": (),
        "block_size": BLOCK, "kv_cache_bytes": blocks * BLOCK * TOKEN_BYTES, "memory_share": 0.1, "max_model_len": 256,
        "max_num_seqs": 64, "max_num_batched_tokens": CHUNK, "lookahead_tokens": 4, "attention_backend": "auto",
        "kv_transport": "gloo", "kv_host": "127.0.0.1", "frame_bytes": 128 << 10, "ring_bytes": 8 << 20,
        "frame_timeout": 2.0, "target_bytes": 2 << 10,
    }  # fmt: skip
    return m.EngineSettings(**{**values, **changes})


class Engine:
    """One engine process after another under one name, and what its front knows of it."""

    def __init__(self, fabric: Fabric, name: str, settings: m.EngineSettings) -> None:
        self.name, self.settings = name, settings
        self.alive = False
        self.load: Load | None = None
        self.report = TransferReport()
        self.epochs = itertools.count(1)
        self.changed = asyncio.Condition()  # load or report
        self.started: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.integrity: asyncio.Queue[m.IntegrityReport] = asyncio.Queue()
        self._fabric = fabric
        self._stack = AsyncExitStack()
        self._pumps: list[asyncio.Task[None]] = []
        self._client: EngineClient

    async def start(self) -> None:
        """Start a process, and wait until it can work."""
        await self._stack.aclose()  # of one that died
        async with AsyncExitStack() as stack:
            self._client = await stack.enter_async_context(EngineClient(self.settings))
            await self._client.start(lambda stage, done: None)
            self._stack = stack.pop_all()
        self.alive, self.load, self.report = True, None, TransferReport()
        self.started.clear()
        self.ended.clear()
        pumps = (self._pump(self._client), self._pump_links(self._client))
        self._pumps = [asyncio.create_task(pump, name=f"pump of {self.name}") for pump in pumps]

    async def close(self) -> None:
        """End the process, whatever state it is in, without the time that a process takes to end by itself."""
        self.alive = False
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        if self._pumps:
            self.signal(signal.SIGKILL)
        await self._stack.aclose()

    def signal(self, number: int, *, deadly: bool = False) -> None:
        """`deadly`: the process will die of it, and with it its links."""
        if deadly:
            self._fabric.expected_deaths.add(self.name)
            for cable in self._fabric.cables_of(self):
                cable.doomed = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def freeze(self) -> None:
        """SIGSTOP; returns when the process stands still."""
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    async def kill(self) -> None:
        """SIGKILL; the fabric hears of it as fronts do, by a reset."""
        self.signal(signal.SIGKILL, deadly=True)
        await asyncio.wait(self._pumps)
        await self._stack.aclose()

    @property
    def pid(self) -> int:
        process = self._client._process
        assert process is not None
        return process.pid

    def send(self, message: m.ToEngine) -> None:
        if isinstance(message, m.StartPrefill | m.Reserve):
            self.started[message.ticket] += 1
        self._client.send(message)

    def tell_link(self, message: m.LinkMessage) -> None:
        if self.alive:
            self._client.send_link(message)

    async def settled(self, until: Callable[[Self], bool], timeout: float = PATIENCE) -> None:
        """Wait until the engine's load and report are as `until` wants them."""
        try:
            async with asyncio.timeout(timeout), self.changed:
                await self.changed.wait_for(lambda: until(self))
        except TimeoutError:
            raise AssertionError(f"{self.name} is not as it should be: {self.load} {self.report}") from None

    async def check_integrity(self) -> m.IntegrityReport:
        self.send(m.CheckIntegrity())
        async with asyncio.timeout(PATIENCE):
            return await self.integrity.get()

    async def _pump(self, client: EngineClient) -> None:
        try:
            while True:
                message = await client.receive()
                if isinstance(message, m.StepDone):
                    await self._on_step(message)
                elif isinstance(message, m.IntegrityReport):
                    self.integrity.put_nowait(message)
                elif isinstance(message, m.TicketMessage):
                    self._fabric.tell(self, message.ticket, message)
        except EngineDied as death:
            self.alive = False
            self._fabric.on_death(self, str(death))

    async def _on_step(self, step: m.StepDone) -> None:
        for done in step.prompts:
            self._fabric.tell(self, done.ticket, done)
        for token in step.tokens:
            self._fabric.tell(self, token.ticket, token)
        for end in step.ends:
            self.ended[end.ticket] += 1
            self._fabric.tell(self, end.ticket, end)
        self.load = step.load
        await self._note()

    async def _pump_links(self, client: EngineClient) -> None:
        with contextlib.suppress(EngineDied):  # the other pump tells
            while True:
                message = await client.receive_link()
                if isinstance(message, m.LinkStats):
                    self.report = message.report
                    await self._note()
                elif not isinstance(message, m.LinkOpened | m.LinkProbe):
                    self._fabric.on_link(self, message)

    async def _note(self) -> None:
        async with self.changed:
            self.changed.notify_all()


@dataclass(eq=False)
class Cable:
    """The control stream between two engines: in order, once, until it ends. A `tap` may change what passes it, or
    take it out (None)."""

    ends: tuple[Engine, Engine]
    epochs: dict[str, int]
    up: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    doomed: bool = False  # its end was brought about
    tap: Tap | None = None
    probed: asyncio.Queue[m.LinkProbed] = field(default_factory=asyncio.Queue)
    _established: set[str] = field(default_factory=set)
    _held: dict[str, list[ControlMessage]] = field(default_factory=dict)

    def other(self, engine: Engine) -> Engine:
        return self.ends[1] if engine is self.ends[0] else self.ends[0]

    def established(self, engine: Engine) -> None:
        self._established.add(engine.name)
        if len(self._established) == 2:
            self.up.set()

    def carry(self, source: Engine, message: ControlMessage) -> None:
        """One message from `source`."""
        tapped = message if self.tap is None else self.tap(source, message)
        if tapped is None or self.over.is_set():
            return
        if (held := self._held.get(source.name)) is not None:
            held.append(tapped)
        else:
            self.deliver(source, tapped)

    def deliver(self, source: Engine, message: ControlMessage) -> None:
        """Past tap and stall; also for words that nobody said, or said before."""
        target = self.other(source)
        if not self.over.is_set():
            target.tell_link(m.LinkControl(source.name, self.epochs[target.name], message))

    async def settled(self) -> None:
        """Wait until the link is up, or over."""
        waits = [asyncio.create_task(event.wait()) for event in (self.up, self.over)]
        _, pending = await asyncio.wait(waits, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        assert len(pending) < 2, "a link came up on neither side, or only on one"

    async def quiet(self) -> None:
        """Wait until the link has measured itself, in both directions: until then its frames are in flight."""
        for engine in self.ends:
            samples: list[tuple[int, float]] = []
            while not samples:  # the answer to one that comes too early is empty
                engine.tell_link(m.LinkProbe(self.other(engine).name, self.epochs[engine.name], [64], 64))
                async with asyncio.timeout(PATIENCE):
                    samples = (await self.probed.get()).samples

    def stall(self, source: Engine) -> None:
        """Hold back what `source` says from now on."""
        self._held.setdefault(source.name, [])

    def go_on(self, source: Engine) -> None:
        for message in self._held.pop(source.name, []):
            self.deliver(source, message)

    def end(self, reason: str, *engines: Engine) -> None:
        """The stream ended, as these engines' fronts noticed (default: both). From now on nothing passes."""
        self.over.set()
        for engine in engines or self.ends:
            engine.tell_link(m.LinkClosed(self.other(engine).name, self.epochs[engine.name], reason))


class Fabric:
    """Engines and the cables between them. `async with` starts all engines, and ends all processes."""

    def __init__(self, **settings: m.EngineSettings) -> None:
        self.engines = {name: Engine(self, name, values) for name, values in settings.items()}
        self.cables: dict[frozenset[str], Cable] = {}
        self.expected_deaths: set[str] = set()
        self.inboxes: dict[str, asyncio.Queue[tuple[str, Event]]] = {}
        self.problems: list[str] = []
        self.strays: Counter[str] = Counter()  # words about tickets that nobody asks for any more

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.TaskGroup() as starts:
                for engine in self.engines.values():
                    starts.create_task(engine.start())
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(engine.close() for engine in self.engines.values()))

    def __getitem__(self, name: str) -> Engine:
        return self.engines[name]

    def inbox(self, ticket: str) -> asyncio.Queue[tuple[str, Event]]:
        """Everything that any engine says about a ticket from now on, with the engine's name."""
        return self.inboxes.setdefault(ticket, asyncio.Queue())

    def tell(self, engine: Engine, ticket: str, event: Event) -> None:
        if (inbox := self.inboxes.get(ticket)) is not None:
            inbox.put_nowait((engine.name, event))
        else:
            self.strays[type(event).__name__] += 1

    def open(self, one: str, other: str) -> Cable:
        """Begin a new link, as fronts do after their hellos; what was there between the two ends. `up` says when."""
        pair = (self[one], self[other])
        if (old := self.cables.get(frozenset((one, other)))) is not None and not old.over.is_set():
            old.end("a newer link took its place")
        cable = Cable(pair, {engine.name: next(engine.epochs) for engine in pair})
        self.cables[frozenset((one, other))] = cable
        for engine in pair:
            opened = m.LinkOpened(cable.other(engine).name, cable.epochs[engine.name], engine is pair[0], "gloo")
            engine.tell_link(opened)
        return cable

    async def link(self, one: str, other: str) -> Cable:
        """A new link that is up."""
        cable = self.open(one, other)
        await cable.settled()
        assert cable.up.is_set()
        return cable

    def cable(self, one: str, other: str) -> Cable:
        return self.cables[frozenset((one, other))]

    def cables_of(self, engine: Engine) -> list[Cable]:
        """Those that are not over."""
        return [cable for cable in self.cables.values() if engine in cable.ends and not cable.over.is_set()]

    def on_link(self, engine: Engine, message: m.LinkMessage) -> None:
        """What an engine says on its link pair; what is about older links is dropped, as by a front."""
        if isinstance(message, m.LinkStats):
            return
        cable = self.cables.get(frozenset((engine.name, message.peer)))
        if cable is None or cable.epochs[engine.name] != message.epoch:
            return
        match message:
            case m.LinkControl(_, _, control):
                cable.carry(engine, control)
            case m.LinkEstablished():
                cable.established(engine)
            case m.LinkProbed():
                cable.probed.put_nowait(message)
            case m.LinkClosed(_, _, reason):
                if not cable.doomed and not cable.over.is_set():
                    self.problems.append(f"{engine.name} lost its link to {message.peer}: {reason}")
                cable.end(reason)

    def on_death(self, engine: Engine, reason: str) -> None:
        if engine.name not in self.expected_deaths:
            self.problems.append(f"{engine.name} died: {reason}")
        self.expected_deaths.discard(engine.name)
        for cable in self.cables_of(engine):
            cable.doomed = True
            cable.end(f"{engine.name}: stream reset")
        for inbox in set(self.inboxes.values()):
            inbox.put_nowait((engine.name, Died(reason)))

    def check_ends(self) -> None:
        """Every ticket ended once for each start, in each process that lives."""
        for engine in self.engines.values():
            if engine.alive:
                missing, more = engine.started - engine.ended, engine.ended - engine.started
                assert not missing + more, f"{engine.name}: {missing} have no end, {more} one too many"
        assert not self.problems, self.problems

    async def check_idle(self) -> None:
        """Nothing is owned, reserved, abandoned or wrong in any process that lives."""
        for engine in self.engines.values():
            if not engine.alive:
                continue
            await engine.settled(lambda e: e.load is None or not e.load.owned_blocks + e.load.reserved_blocks)
            found = await engine.check_integrity()
            assert found.problem == "", f"{engine.name}: {found.problem}"
            assert (found.load.owned_blocks, found.load.reserved_blocks) == (0, 0), f"{engine.name}: {found.load}"
            assert engine.report.threads_abandoned == 0, engine.name
