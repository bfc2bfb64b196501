"""A router in this process over scripted workers, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from pdserve.client import NO_RETRIES, Client
from pdserve.router.config import RouterSettings
from pdserve.router.fleet import Fleet
from pdserve.router.links import Links
from pdserve.router.models import load_models
from pdserve.router.service import SERVICE, InferenceService
from pdserve.rpc.server import GrpcServer
from pdserve.v1 import inference_pb2_grpc
from tests.integration.scripted_worker import ScriptedWorker, Wire
from tests.tiny_models import write_tiny_tokenizer

PATIENCE = 5.0


def tokenizer_only(folder: Path) -> Path:
    """Make a model folder without weights: the router reads none."""
    folder.mkdir()
    write_tiny_tokenizer(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [258, 256]}')
    return folder


class Suite:
    def __init__(
        self, client: Client, fleet: Fleet, service: InferenceService, endpoint: str, wires: Sequence[Wire]
    ) -> None:
        self.client, self.fleet, self.service, self.endpoint = client, fleet, service, endpoint
        self._listeners = [fleet.on_change, *(wire.on_change for wire in wires)]

    async def until(self, condition: Any) -> None:
        """Wait, on changes of the fleet and on what workers see, until `condition()` holds."""
        changed = asyncio.Event()
        for listeners in self._listeners:
            listeners.append(changed.set)
        try:
            async with asyncio.timeout(PATIENCE):
                while not condition():
                    changed.clear()
                    await changed.wait()
        finally:
            for listeners in self._listeners:
                listeners.remove(changed.set)

    def no_accounts_open(self) -> bool:
        return all(
            worker.ledger.outstanding_tokens == worker.ledger.sequences == worker.ledger.in_flight_tokens == 0
            for worker in self.fleet.workers
        )


@asynccontextmanager
async def suite(
    folder: Path, *workers: ScriptedWorker, own_workers: bool = True, **settings: Any
) -> AsyncIterator[Suite]:
    """A router over `workers`, which run already where they are not its own."""
    async with AsyncExitStack() as scope:
        for worker in workers if own_workers else ():
            await scope.enter_async_context(worker)
        names = [worker.endpoint for worker in workers]
        options = RouterSettings.load([])  # defaults
        options = options.model_copy(update={"worker": names, "model": [f"tiny={folder}"], **settings})
        models = load_models(options.model, Path)
        service = InferenceService(options)
        add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
        server = await scope.enter_async_context(GrpcServer(options, [(add, service, SERVICE)]))
        fleet = await scope.enter_async_context(Fleet(options, models))
        await scope.enter_async_context(Links(fleet))
        service.start(models, fleet)
        client = await scope.enter_async_context(Client(server.endpoint, retry=NO_RETRIES))
        wires = {id(worker.wire): worker.wire for worker in workers}
        made = Suite(client, fleet, service, server.endpoint, list(wires.values()))
        await made.until(lambda: all(worker.connected for worker in fleet.workers))
        yield made
        await made.until(made.no_accounts_open)


def pair(**options: Any) -> tuple[ScriptedWorker, ScriptedWorker]:
    wire = Wire()
    return ScriptedWorker("p0", "prefill", wire), ScriptedWorker("d0", "decode", wire, **options)
