"""A simulated worker: the real front with its servicers, over a SimEngine, at an endpoint of the simulated network."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from pdserve.decode.service import make_service as make_decode
from pdserve.engine.scheduler import SchedulerConfig
from pdserve.prefill.service import make_service as make_prefill
from pdserve.worker.config import WorkerSettings
from pdserve.worker.front import WorkerFront
from tests.sim.engine import MAX_MODEL_LEN, SimEngine
from tests.sim.loop import Process
from tests.sim.network import Server

if TYPE_CHECKING:
    from tests.sim.world import World

MODEL = "tiny"
STALL = 3.0  # seconds
DRAIN = 60.0  # seconds; nothing that runs takes as long, whatever stops for a while
_SETTINGS: dict[str, Any] = {"host": "127.0.0.1", "model": MODEL, "threads": 1, "engine_stall_seconds": STALL}
_MAKE = {"prefill": make_prefill, "decode": make_decode}


class _Launcher:
    def report(self, event: str, **details: Any) -> None:
        """Nobody launched us."""


class _GrpcServer:
    """What a front asks of its rpc.server.GrpcServer."""

    def __init__(self, worker: SimWorker) -> None:
        self.endpoint, self.launcher = worker.endpoint, _Launcher()
        self._worker = worker

    async def set_ready(self, ready: bool, **details: Any) -> None:
        pass

    async def set_health(self, serving: bool) -> None:
        pass

    def fail(self, reason: str) -> None:
        self._worker.world.problem(f"{self._worker.name} failed: {reason}")


class SimWorker:
    """One name in the fleet, and whatever process stands behind it now."""

    def __init__(self, world: World, name: str, role: str, endpoint: str, *, blocks: int, seats: int) -> None:
        self.world, self.name, self.role, self.endpoint = world, name, role, endpoint
        self.incarnations = 0
        self._blocks = blocks
        lookahead, batched = 4, 16
        self._config = SchedulerConfig(MAX_MODEL_LEN, seats, batched, lookahead, watermark_blocks=1)
        self._settings = _settings().model_copy(
            update={"max_num_seqs": seats, "max_num_batched_tokens": batched, "lookahead_tokens": lookahead}
        )
        self.process = Process(name)
        self.process.alive = False
        self.engine: SimEngine
        self.front: WorkerFront
        self.service: Any

    @property
    def up(self) -> bool:
        return self.process.alive

    def start(self) -> None:
        """A new process, of a new incarnation, unless one runs."""
        if self.up:
            return
        world = self.world
        self.incarnations += 1
        self.process = process = Process(f"{self.name}/{self.incarnations}")
        with process.entered():
            self.engine = SimEngine(world, process, self.name, self._config, self._blocks)
            self.front = WorkerFront(
                self._settings,
                self.role,
                self.name,
                incarnation=process.name,
                engine=cast(Any, self.engine),
                dial=lambda endpoint: cast(Any, world.network.channel(process, endpoint)),
            )
            self.service, own = _MAKE[self.role](self.front)
            server = world.network.servers[self.endpoint] = Server(process)
            add: Callable[[Any, Any], None]
            for add, servicer, _ in (own, *self.front.services()):
                add(servicer, server)
            run = self.front.run(cast(Any, _GrpcServer(self)), self.service)
            world.loop.create_task(run, name=f"front of {process.name}")

    def kill(self) -> None:
        """SIGKILL: its pages are gone, and everybody who was connected hears of a reset."""
        self.process.kill(self.world.loop)
        self.engine.process.kill(self.world.loop)
        self.world.network.reset(self.process)
        for link in [link for link in self.world.links.values() if link.engine is self.engine]:
            del self.world.links[link.name]

    async def leave(self) -> None:
        """SIGTERM: drained, then gone."""
        process = self.process
        with process.entered():
            work = self.world.loop.create_task(self.front.drain(), name=f"drain of {process.name}")
        await self.world.within(DRAIN, [work])
        if self.process is process and self.up:
            self.kill()

    def leftovers(self) -> list[str]:
        """What it still holds; empty where it is idle."""
        engine, handoff = self.engine.engine, self.engine.turn.handoff
        common = self.engine.hub._common
        held = {
            "tickets without an end": self.engine.open.total(),
            "pages": engine.scheduler.pool.num_owned,
            "sequences": len(engine.scheduler),
            "loans": len(engine.scheduler._lent),
            "clocks": len(engine._clocks),
            "hand-offs": len(engine._hands_off),
            "tickets": len(handoff._tickets),
            "rearms": len(handoff._rearming),
            "closings": len(handoff._closing),
            "pulls": len(handoff._pulls._pulls),
            "sends": len(common.outgoing.by_ticket),
            "receives": len(common.incoming.by_ticket),
            "tickets of the front": len(getattr(self.service, "_tickets", ())),
            "calls of the front": len(getattr(self.service, "_calls", ())),
            "attempts of the front": sum(len(getattr(s, "attempts", ())) for s in self.service._sessions),
        }
        return [f"{self.name} keeps {count} {what}" for what, count in held.items() if count]


_made: list[WorkerSettings] = []


def _settings() -> WorkerSettings:
    if not _made:
        _made.append(WorkerSettings.load(["--model", MODEL]).model_copy(update=_SETTINGS))
    return _made[0]
