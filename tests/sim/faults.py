"""What breaks, when the plan says so, and is mended after a while."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from pdserve.transfer.messages import Committed, ControlMessage, Grant, TicketClosed
from tests.sim.loop import Process
from tests.sim.worker import SimWorker

if TYPE_CHECKING:
    from tests.sim.engine import SimEngine
    from tests.sim.world import World

FAULTS = (
    "kill_worker",
    "kill_worker",
    "stop_worker",
    "stop_engine",
    "slow_worker",
    "drain_worker",
    "cut_router",
    "cut_link",
    "break_link",
    "break_link",
    "kill_router",
    "stop_router",
)
BRIEF, LONG = (0.01, 0.3), (0.5, 5.0)  # seconds: below and above the leases


class Nemesis:
    """One world's. Each fault is a method; it picks its victim when it comes."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world, self._rng = world, rng

    async def run(self) -> None:
        """Bring about the plan's faults, and return when all is mended."""
        tasks = []
        for at, name in self._world.plan.faults:
            fault: Coroutine[Any, Any, None] = getattr(self, name)(at)
            tasks.append(self._world.loop.create_task(fault, name=name))
        await asyncio.gather(*tasks)

    def echo(self, engine: SimEngine, peer: str, epoch: int, message: ControlMessage) -> None:
        """Now and then the other end hears a word twice, the second time late."""
        if not isinstance(message, Grant | TicketClosed | Committed) or self._rng.random() >= self._world.plan.echoes:
            return
        other = next((w for w in self._world.workers if w.name == peer and w.up), None)
        link = other.engine.hub._links.get(engine.worker_id) if other is not None else None
        if other is None or link is None:
            return
        deaf = (engine.worker_id, link.epoch, message)
        self._note(f"echo to {peer}: {message}")
        there = other.engine
        there.later(lambda: there.hear_again(*deaf), self._rng.choice([0.0, 0.01, 0.3]))

    async def kill_worker(self, at: float) -> None:
        await asyncio.sleep(at)
        if (worker := self._worker()) is not None:
            self._note(f"kill {worker.name}")
            worker.kill()
            await self._pause(BRIEF)
            self._note(f"start {worker.name}")
            worker.start()

    async def drain_worker(self, at: float) -> None:
        await asyncio.sleep(at)
        if (worker := self._worker()) is not None:
            self._note(f"drain {worker.name}")
            await worker.leave()
            await self._pause(BRIEF)
            self._note(f"start {worker.name}")
            worker.start()

    async def stop_worker(self, at: float) -> None:
        await asyncio.sleep(at)
        if (worker := self._worker()) is not None:
            await self._stop(worker.process, worker.engine.process)

    async def stop_engine(self, at: float) -> None:
        await asyncio.sleep(at)
        if (worker := self._worker()) is not None:
            await self._stop(worker.engine.process)

    async def slow_worker(self, at: float) -> None:
        await asyncio.sleep(at)
        if (worker := self._worker()) is not None:
            self._note(f"slow {worker.name}")
            engine = worker.engine
            engine.slowness = self._rng.choice([5.0, 50.0])
            await self._pause(LONG)
            engine.slowness = 1.0

    async def cut_router(self, at: float) -> None:
        """A router and a worker lose their connection."""
        await asyncio.sleep(at)
        router, worker = self._rng.choice(self._world.routers), self._worker()
        if worker is not None:
            count = self._world.network.cut(router.process, worker.process)
            self._note(f"cut {router.name} from {worker.name}: {count} calls")

    async def cut_link(self, at: float) -> None:
        """Two workers lose their link's control stream."""
        await asyncio.sleep(at)
        links = list(self._world.links.values())
        if links:
            link = self._rng.choice(links)
            peer = next(w for w in self._world.workers if w.name == link.peer)
            front = next(w for w in self._world.workers if w.engine is link.engine).process
            count = self._world.network.cut(front, peer.process)
            self._note(f"cut {link.engine.worker_id} from {link.peer}: {count} calls")

    async def break_link(self, at: float) -> None:
        """One end of a link finds its data half broken."""
        await asyncio.sleep(at)
        links = [link for link in self._world.links.values() if link.established and link.engine.process.alive]
        if links:
            link = self._rng.choice(links)
            self._note(f"break {link.engine.worker_id}'s end to {link.peer}")
            link.engine.later(lambda: link.breaks("broken"))

    async def kill_router(self, at: float) -> None:
        await asyncio.sleep(at)
        router = self._rng.choice(self._world.routers)
        if router.process.alive:
            self._note(f"kill {router.name}")
            router.kill()
            await self._pause(BRIEF)
            self._note(f"start {router.name}")
            router.start()

    async def stop_router(self, at: float) -> None:
        await asyncio.sleep(at)
        router = self._rng.choice(self._world.routers)
        if router.process.alive:
            await self._stop(router.process)

    async def _stop(self, *processes: Process) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        if any(process.stopped for process in processes):
            return
        for process in processes:
            self._note(f"stop {process.name}")
            process.stop()
        await self._pause(self._rng.choice([BRIEF, LONG]))
        for process in processes:
            self._note(f"continue {process.name}")
            process.go_on(self._world.loop)

    def _worker(self) -> SimWorker | None:
        """One that runs, whole."""
        running = [worker for worker in self._world.workers if worker.up]
        return self._rng.choice(running) if running else None

    async def _pause(self, between: tuple[float, float]) -> None:
        await asyncio.sleep(self._rng.uniform(*between))

    def _note(self, what: str) -> None:
        self._world.log(f"FAULT {what}")
        self._world.seen[what.split()[0]] += 1
