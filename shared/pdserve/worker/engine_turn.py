"""What an engine process does between two looks at its sockets: it takes in what came, and tells what happened.

Knows neither sockets nor threads, so that whoever drives it says what comes when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pdserve.core.errors import ConfigError, IntegrityError
from pdserve.core.sequence import EndReason
from pdserve.engine.block_io import export_blocks, load_blocks
from pdserve.engine.engine import Engine
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.outputs import Load
from pdserve.transfer.messages import TransferEvent
from pdserve.worker.handoff import Handoff, Links
from pdserve.worker.messages import (
    BlocksExported,
    CallOff,
    CancelTicket,
    CheckIntegrity,
    EngineSettings,
    ExportBlocks,
    FromEngine,
    HandOff,
    IntegrityReport,
    LoadBlocks,
    Ping,
    Pong,
    Rearm,
    Reserve,
    Shutdown,
    StartPrefill,
    StepDone,
    TicketMessage,
    ToEngine,
)


class EngineTurn:
    """One engine's. `events` takes what links say, from any thread; `stats` are the bytes that they sent and received;
    `on_ticket` hears of what is told of tickets."""

    def __init__(
        self,
        engine: Engine,
        kv: KVCache,
        links: Links,
        stats: Callable[[], tuple[int, int]],
        send: Callable[[FromEngine], None],
        vocab_size: int,
        on_ticket: Callable[[TicketMessage], None] = lambda message: None,
    ) -> None:
        self.events: deque[TransferEvent] = deque()
        self.running = True
        self.handoff = Handoff(engine, links, self._tell_ticket, vocab_size)
        self._engine, self._kv, self._stats, self._send, self._on_ticket = engine, kv, stats, send, on_ticket
        self._number = self._prompts_taken = 0
        self._told: Load | None = None

    def take_events(self) -> None:
        """Take in what links said so far."""
        while self.events:
            self.handoff.on_event(self.events.popleft())

    def handle(self, message: ToEngine) -> None:
        """Take in a message. Raises ConfigError for a second EngineSettings."""
        pool = self._engine.scheduler.pool
        match message:
            case StartPrefill():
                self._prompts_taken += 1
                self.handoff.start_prefill(message)
            case Reserve():
                self.handoff.reserve(message)
            case Rearm():
                self.handoff.rearm(message)
            case HandOff():
                self.handoff.hand_off(message)
            case CallOff():
                self.handoff.call_off(message)
            case CancelTicket(ticket):
                self.handoff.close(ticket, EndReason.CANCELLED)
            case LoadBlocks(hashes, payload):
                load_blocks(self._kv, pool, hashes, payload)
            case ExportBlocks(hashes):
                self._send(BlocksExported(*export_blocks(self._kv, pool, hashes)))
            case Ping():
                self._send(Pong())
            case CheckIntegrity():
                self._send(IntegrityReport(self._problem(), self._engine.load(*self._stats())))
            case Shutdown():
                self.running = False
            case EngineSettings():
                raise ConfigError("an engine process takes its settings once")

    def end_late(self) -> None:
        """End tickets whose time is over, and give up pulls that take too long."""
        now = self._engine.clock()
        for late in [s.id for s in self._engine.scheduler if s.deadline is not None and s.deadline <= now]:
            self.handoff.close(late, EndReason.DEADLINE, "the request's time is over")
        self.handoff.give_up_late(now)

    def tell(self) -> None:
        """Send what happened as one message; nothing where nothing did."""
        outputs = self._engine.take_outputs()
        self.handoff.after_step(outputs)
        load = self._engine.load(*self._stats())
        stored, removed = self._engine.scheduler.pool.take_changes()
        if outputs or stored or removed or load != self._told:
            self._number += 1
            self._send(
                StepDone(
                    number=self._number,
                    load=load,
                    tokens=outputs.tokens,
                    ends=outputs.ends,
                    prompts=outputs.prompts,
                    chunks=outputs.chunks,
                    stored=stored,
                    removed=removed,
                    seconds=outputs.seconds,
                    prompts_taken=self._prompts_taken,
                )
            )
            self._told = load

    @property
    def due(self) -> float | None:
        """When there is something to do though nothing comes, on the engine's clock; None: not at all."""
        deadlines = [
            s.deadline for s in self._engine.scheduler if s.deadline is not None and not self.handoff.closing(s.id)
        ]
        if self.handoff.deadline is not None:
            deadlines.append(self.handoff.deadline)
        return min(deadlines, default=None)

    def _tell_ticket(self, message: TicketMessage) -> None:
        self._send(message)
        self._on_ticket(message)

    def _problem(self) -> str:
        try:
            self._engine.scheduler.check_integrity()
        except IntegrityError as error:
            return str(error)
        return ""
