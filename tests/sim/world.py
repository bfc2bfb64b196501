"""A fleet in virtual time: routers, workers, links, clients and what breaks them, all of it drawn from one seed.

After each event the books of all who took part must add up. When all clients have had their answers and everything is
mended, nothing may be left anywhere.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

from pdserve.router.models import Models
from tests.sim.client import Client
from tests.sim.fabric import SimLink
from tests.sim.faults import Nemesis
from tests.sim.loop import Process, VirtualLoop
from tests.sim.network import Network, latencies
from tests.sim.plan import Plan
from tests.sim.router import SimRouter
from tests.sim.worker import SimWorker

PATIENCE = 500.0  # seconds of virtual time within which every request must have ended, whatever broke
QUIET = 30.0  # seconds after which nobody may hold anything any more: above every lease and timeout
LOOK = 0.25


class World:
    """One seed's. `run` is called once; `problems` are what must not be, `seen` counts what happened."""

    def __init__(self, loop: VirtualLoop, seed: int, models: Models) -> None:
        self.loop, self.seed = loop, seed
        self.rng = random.Random(f"{seed} names")
        self.plan = Plan.draw(random.Random(f"{seed} plan"))
        self.network = Network(loop, latencies(random.Random(f"{seed} latency")), self.log)
        self.events: list[str] = []
        self.problems: list[str] = []
        self.seen: Counter[str] = Counter()
        self.links: dict[int, SimLink] = {}
        self.link_names = itertools.count(1)
        plan = self.plan
        roles = [("prefill", n) for n in range(plan.prefills)] + [("decode", n) for n in range(plan.decodes)]
        self.workers = [
            SimWorker(self, f"{role[0]}{n}", role, f"10.0.0.{at}:1", blocks=plan.blocks[role], seats=plan.seats)
            for at, (role, n) in enumerate(roles, 1)
        ]
        endpoints = [worker.endpoint for worker in self.workers]
        self.routers = [SimRouter(self, f"r{n}", f"10.0.1.{n}:1", models, endpoints) for n in range(plan.routers)]
        self.nemesis = Nemesis(self, random.Random(f"{seed} faults"))

    def log(self, line: str) -> None:
        """Note an event; the whole of them is what a replay must repeat."""
        self.events.append(f"{self.loop.time():.6f} {line}")

    def problem(self, text: str) -> None:
        """Note what must not be."""
        self.log(f"PROBLEM {text}")
        self.problems.append(text)

    async def run(self) -> None:
        """Everything, from the first start to the last look."""
        for node in (*self.workers, *self.routers):
            node.start()
        people = Process("clients")
        with people.entered():
            clients = [Client(self, request, people) for request in self.plan.requests]
            asking = [self.loop.create_task(client.run(), name=client.request.name) for client in clients]
        breaking = self.loop.create_task(self.nemesis.run(), name="nemesis")
        try:
            await self.within(PATIENCE, asking)
            await self.within(PATIENCE, [breaking])
            await self._settle()
        finally:
            self.seen.update(client.outcome or "hung" for client in clients)
            await self._stop()

    async def within(self, seconds: float, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """Wait for tasks, and note those that fail, or do not end in time."""
        tasks = list(tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            if not task.done():
                self.problem(f"{task.get_name()} has not ended after {seconds:g} s")
                task.cancel()
            elif not task.cancelled() and (error := task.exception()) is not None:
                self.problem(f"{task.get_name()}: {error!r}")

    async def _settle(self) -> None:
        """Wait until nobody holds anything."""
        until, left = self.loop.time() + QUIET, ["not looked yet"]
        while left and self.loop.time() < until:
            await asyncio.sleep(LOOK)
            left = [line for node in (*self.workers, *self.routers) for line in node.leftovers()]
        for line in left:
            self.problem(line)
        for worker in self.workers:
            worker.engine.check()

    async def _stop(self) -> None:
        for node in (*self.routers, *self.workers):
            if node.process.alive:
                node.kill()
        await asyncio.sleep(10.0)  # for whoever unwinds with a timeout
        mine = asyncio.current_task()
        left = [task for task in asyncio.all_tasks() if task is not mine]
        for task in left:
            self.problem(f"{task.get_name()} does not end")
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        self.problems += self.loop.problems
