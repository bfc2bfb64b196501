"""An engine process of a simulated worker: the real scheduler, pool, engine, hand-off and hub over the hash model.

It stands where WorkerFront has its EngineClient. The two talk over pipes that keep order and take time, one for
requests and steps, read between steps, and one for link control, read at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

from pdserve.core.errors import IntegrityError
from pdserve.engine.engine import Engine
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.scheduler import SchedulerConfig
from pdserve.transfer.hub import LinkHub, LinkSettings
from pdserve.transfer.messages import PULL_SUFFIX, ControlMessage, pulled_ticket
from pdserve.worker import messages as m
from pdserve.worker.engine_turn import EngineTurn
from tests.sim.fabric import SimLink
from tests.sim.loop import Process
from tests.sim.model import LAYOUT, HashRunner
from tests.sim.network import Pipe
from tests.tiny_models import VOCAB_SIZE

if TYPE_CHECKING:
    from tests.sim.world import World

MAX_MODEL_LEN = 96
PREFILL_RATE = 300.0  # tokens a second, as if it had been measured


class SimEngine:
    """As EngineClient, with the engine itself. `blocks` is the size of its pool, `pace` seconds of a step beside
    what its tokens take."""

    def __init__(self, world: World, front: Process, worker_id: str, config: SchedulerConfig, blocks: int) -> None:
        self.world, self.worker_id = world, worker_id
        self.process = Process(f"{front.name} engine")
        self.slowness = 1.0
        self.kv = KVCache(LAYOUT, blocks, "cpu")
        self.runner = HashRunner(self.kv, self._computed)
        loop = world.loop
        self._lag = 0.0  # how far a step that runs now has come in its own eyes
        self.engine = Engine(
            cast(Any, self.runner), LAYOUT, config, self._on_layer, clock=lambda: loop.time() + self._lag
        )
        self.engine.prefill_rate = PREFILL_RATE
        self.hub = LinkHub(
            self.kv,
            LAYOUT,
            LinkSettings(frame_bytes=64, ring_bytes=64 * 256, target_bytes=32),
            send_control=self._say_control,
            established=lambda peer, epoch: self._say_link(m.LinkEstablished(peer, epoch)),
            closed=lambda peer, epoch, reason: self._say_link(m.LinkClosed(peer, epoch, reason)),
            notify=self._notify,
            clock=loop.time,
            make_link=partial(SimLink, self),
        )
        self.turn = EngineTurn(self.engine, self.kv, self.hub, self.hub.stats, self._say, VOCAB_SIZE)
        self.open: Counter[str] = Counter()  # tickets that were begun and have not ended
        self._inbox: deque[m.ToEngine] = deque()
        self._wake = asyncio.Event()
        ours = self.process
        self._to_engine, self._to_front = Pipe(world.network, front, ours), Pipe(world.network, ours, front)
        self._links_in, self._links_out = Pipe(world.network, front, ours), Pipe(world.network, ours, front)
        self._told: asyncio.Queue[m.FromEngine] = asyncio.Queue()
        self._link_told: asyncio.Queue[m.LinkMessage] = asyncio.Queue()

    # As EngineClient.

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def start(self, progress: object) -> m.EngineStarted:
        with self.process.entered():
            self._running = asyncio.create_task(self._run(), name=f"engine of {self.worker_id}")
        return m.EngineStarted(
            layout=LAYOUT,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            total_blocks=self.kv.num_blocks,
            watermark_blocks=self.engine.scheduler.config.watermark_blocks,
            device="cpu",
            transports=["gloo"],
            versions={},
            notes={},
            load=self.engine.load(),
        )

    def send(self, message: m.ToEngine) -> None:
        self._to_engine.send(self._take, message)

    def send_link(self, message: m.LinkMessage) -> None:
        self._links_in.send(self._take_link, message)

    async def receive(self) -> m.FromEngine:
        return await self._told.get()

    async def receive_link(self) -> m.LinkMessage:
        return await self._link_told.get()

    # The process.

    def later(self, work: Callable[[], None], seconds: float = 0.0) -> None:
        """Do something in this process, with no lock held."""
        self.world.loop.call_later(seconds, work, context=self.process.context)

    def check(self) -> None:
        """Raise IntegrityError where the books do not add up, or a page has two that may write to it."""
        scheduler, size = self.engine.scheduler, LAYOUT.block_size
        scheduler.check_integrity()
        writable: set[int] = set()
        for sequence in scheduler:
            mine = sequence.block_table[sequence.num_published :]
            if len(set(mine)) < len(mine) or writable & set(mine):
                raise IntegrityError(f"{sequence.id} shares pages that it writes to: {mine}")
            writable.update(mine)
        for ticket, incoming in self.hub._common.incoming.by_ticket.items():
            found = scheduler.get(pulled_ticket(ticket) if ticket.endswith(PULL_SUFFIX) else ticket)
            if found is None or not set((incoming.slots // size).tolist()) <= set(found[0].block_table):
                raise IntegrityError(f"a link may write to pages that {ticket} does not hold")

    async def _run(self) -> None:
        try:
            while True:
                due, now = self.turn.due, self.world.loop.time()
                timer = None
                if not (self._inbox or self.turn.events or self.engine.has_work):
                    if due is not None:
                        timer = self.world.loop.call_at(max(now, due), self._wake.set)
                    await self._wake.wait()
                if timer is not None:
                    timer.cancel()
                self._wake.clear()
                await self._one_turn()
        except Exception as error:
            self.world.problem(f"engine of {self.worker_id}: {error!r}")
            raise

    async def _one_turn(self) -> None:
        self.turn.take_events()
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, m.StartPrefill | m.Reserve):
                self.open[message.ticket] += 1
            self.turn.handle(message)
        self.turn.end_late()
        self.pump()
        if self.engine.has_work:
            self.engine.step()
            seconds, self._lag = self._lag, 0.0
            if seconds:
                await asyncio.sleep(seconds)
        self.turn.tell()
        self.check()
        self.pump()

    def pump(self) -> None:
        """Let the links' threads do what they can."""
        for link in list(self.hub._links.values()):
            cast(SimLink, link).pump()

    def _computed(self, tokens: int) -> None:
        self._lag = self.slowness * (0.001 + tokens / PREFILL_RATE)

    def _on_layer(self, progress: Any, layer: int) -> None:
        self.hub.advance(progress, layer)

    def _notify(self, event: object) -> None:
        self.turn.events.append(cast(Any, event))
        self._wake.set()

    def _take(self, message: m.ToEngine) -> None:
        self._inbox.append(message)
        self._wake.set()

    def _take_link(self, message: m.LinkMessage) -> None:
        match message:
            case m.LinkOpened(peer, epoch, initiator, transport):
                self.hub.open(peer, epoch, initiator, transport)
            case m.LinkControl(peer, epoch, control):
                self.hub.on_control(peer, epoch, control)
            case m.LinkClosed(peer, epoch, reason):
                self.hub.close(peer, epoch, reason)
        self.pump()

    def _say(self, message: m.FromEngine) -> None:
        self.world.log(f"{self.worker_id} {_brief(message)}")
        seen = self.world.seen
        if isinstance(message, m.StepDone):
            for end in message.ends:
                seen[str(end.reason)] += 1
                self.open[end.ticket] -= 1
                if self.open[end.ticket] < 0:
                    raise IntegrityError(f"{end.ticket} ended once too often: {end}")
            seen["pulled"] += sum(done.pulled_tokens > 0 for done in message.prompts)
        else:
            seen[type(message).__name__] += 1
            if isinstance(message, m.AttemptFailed) and "frame" in message.reason:
                # Links keep order here, so whatever broke, frames that do not fit are somebody's mistake.
                self.world.problem(f"{self.worker_id}: {message}")
        self._to_front.send(self._told.put_nowait, message)

    def _say_control(self, peer: str, epoch: int, message: ControlMessage) -> None:
        self._say_link(m.LinkControl(peer, epoch, message))
        self.world.nemesis.echo(self, peer, epoch, message)

    def hear_again(self, peer: str, epoch: int, message: ControlMessage) -> None:
        """A word of the peer's that came before."""
        self.hub.on_control(peer, epoch, message)
        self.pump()

    def _say_link(self, message: m.LinkMessage) -> None:
        self._links_out.send(self._link_told.put_nowait, message)


def _brief(message: m.FromEngine) -> str:
    if not isinstance(message, m.StepDone):
        return str(message)
    tokens = [(out.ticket[:6], out.position, out.token) for out in message.tokens]
    ends = [(end.ticket[:6], str(end.reason), end.detail) for end in message.ends]
    load = message.load
    return f"step {message.number} {tokens} {ends} {load.free_blocks} {load.cached_blocks} {load.owned_blocks}"
