"""A simulated router: the real InferenceService, Fleet, Links and Dispatcher in a process of their own."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, cast

from pdserve.router.config import RouterSettings
from pdserve.router.fleet import Fleet
from pdserve.router.ledger import Ledger
from pdserve.router.links import Links
from pdserve.router.models import Models
from pdserve.router.service import InferenceService
from pdserve.v1 import inference_pb2_grpc
from tests.sim.loop import Process
from tests.sim.network import Server

if TYPE_CHECKING:
    from tests.sim.world import World

LEASE = 2.0  # seconds
# Nothing but its own deadline may end a request here: what is to be found is who gives up, or hangs.
PATIENT = {"max_replays": 1000, "max_worker_deaths": 1000, "no_worker_seconds": 1000.0, "lease_seconds": LEASE}


class SimRouter:
    """One name, and whatever process stands behind it now."""

    def __init__(self, world: World, name: str, endpoint: str, models: Models, workers: list[str]) -> None:
        self.world, self.name, self.endpoint = world, name, endpoint
        self.process = Process(name)
        self.process.alive = False
        self.incarnations = 0
        self.service: InferenceService
        self.fleet: Fleet
        self._models = models
        update = {**PATIENT, "worker": workers}
        self._settings = _settings().model_copy(update=update)

    def start(self) -> None:
        """A new process, unless one runs."""
        if self.process.alive:
            return
        world = self.world
        self.incarnations += 1
        self.process = process = Process(f"{self.name}/{self.incarnations}", self.check)
        chance = random.Random(world.rng.getrandbits(64))
        with process.entered():
            self.service = InferenceService(self._settings)
            self.fleet = Fleet(
                self._settings,
                self._models,
                dial=lambda endpoint, lease, name: cast(Any, world.network.channel(process, endpoint)),
                chance=chance,
            )
            server = world.network.servers[self.endpoint] = Server(process)
            inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.service, cast(Any, server))
            world.loop.create_task(self._run(self.fleet, self.service), name=f"run of {process.name}")

    async def _run(self, fleet: Fleet, service: InferenceService) -> None:
        async with fleet, Links(fleet):
            service.start(self._models, fleet)
            await asyncio.Event().wait()

    def kill(self) -> None:
        self.process.kill(self.world.loop)
        self.world.network.reset(self.process)

    def check(self) -> None:
        """Sums in its ledgers never go below nothing."""
        for worker in self.fleet.workers:
            ledger = worker.ledger
            flying = min(ledger.in_flight_tokens, ledger.in_flight_squares, ledger.in_flight_blocks)
            if min(flying, ledger.outstanding_tokens, ledger.sequences) < 0:
                self.world.problem(f"{self.name}'s ledger of {worker.worker_id} went below nothing: {_sums(ledger)}")

    def leftovers(self) -> list[str]:
        """What it still holds; empty where it is idle."""
        left = []
        for worker in self.fleet.workers:
            ledger = worker.ledger
            sums = (ledger.outstanding_tokens, ledger.sequences, ledger.in_flight_tokens, ledger.in_flight_blocks)
            if any(sums):
                left.append(f"{self.name}'s ledger of {worker.worker_id} keeps {_sums(ledger)}")
            if worker.session is not None and worker.session._sinks:
                left.append(f"{self.name}'s session with {worker.worker_id} keeps {len(worker.session._sinks)} tickets")
            if worker.prefills is not None and worker.prefills.running:
                left.append(f"{self.name}'s session with {worker.worker_id} keeps {worker.prefills.running} prefills")
        if waiting := self.service.waiting(""):
            left.append(f"{waiting} requests wait at {self.name}")
        if self.service._running:
            left.append(f"{self.service._running} requests run at {self.name}")
        for task in self.process.tasks:
            if task.get_name().startswith("place "):
                left.append(f"{self.name} left {task.get_name()}")
        return left


def _sums(ledger: Ledger) -> str:
    flying = f"{ledger.in_flight_tokens} tokens and {ledger.in_flight_blocks} blocks in flight"
    return f"{ledger.sequences} sequences with {ledger.outstanding_tokens} tokens, {flying}"


_made: list[RouterSettings] = []


def _settings() -> RouterSettings:
    if not _made:
        _made.append(RouterSettings.load([]))
    return _made[0]
