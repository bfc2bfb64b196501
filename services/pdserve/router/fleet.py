"""The fleet as this router sees it: which endpoints there are, and views of their workers for the policies."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import random
import socket
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Self

import structlog

from pdserve.core.hashing import block_hashes, root_hash
from pdserve.core.layout import KVLayout
from pdserve.policy.fleet import FleetView
from pdserve.policy.prefix_index import PrefixIndex
from pdserve.router.config import RouterSettings
from pdserve.router.models import ModelFacts, Models, ServedModel
from pdserve.router.views import ModelViews
from pdserve.router.worker import Dial, Worker, lease_channel
from pdserve.rpc.endpoint import parse_endpoint

log = structlog.get_logger(__name__)

# About a millisecond of hashing; above it a thread does it.
LONG_PROMPT = 8192


class Fleet:
    """Follows every worker while its scope is open.

    Callbacks run on the loop and must not block: `on_change` for whatever workers report, `on_membership` only when
    one comes, goes or starts to drain.
    """

    def __init__(
        self,
        settings: RouterSettings,
        models: Models,
        *,
        dial: Dial = lease_channel,
        chance: random.Random | None = None,
    ) -> None:
        """`chance` draws names, which nobody may guess, and pauses; None: the system's."""
        self.chance = chance or random.SystemRandom()
        self.router_id = f"router-{self.chance.randbytes(4).hex()}"
        self.on_change: list[Callable[[], None]] = []
        self.on_membership: list[Callable[[], None]] = []
        self._settings = settings
        self._dial = dial
        self._models = models
        self._names: dict[str, str] = {}  # what an address was resolved from, for its certificate
        self._targets = [parse_endpoint(target) for target in settings.worker]
        self._workers: dict[str, Worker] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._resolver: asyncio.Task[None] | None = None
        self._members = asyncio.Event()
        self._warned: set[str] = set()
        self._index = PrefixIndex()
        # What follows from who there is, until that changes.
        self._views: dict[str, ModelViews] = {}
        self._by_id: dict[str, Worker] | None = None
        self._silent: list[Worker] | None = None

    async def __aenter__(self) -> Self:
        self._apply({f"{_bracket(host)}:{port}" for host, port in self._targets if not _needs_resolving(host)})
        if any(_needs_resolving(host) for host, _ in self._targets):
            self._resolver = asyncio.create_task(self._resolve_always(), name="resolver")
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._tasks.values(), *([self._resolver] if self._resolver else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def workers(self) -> Iterable[Worker]:
        return self._workers.values()

    def by_id(self, worker_id: str) -> Worker | None:
        """The connected worker of that id."""
        if self._by_id is None:
            self._by_id = {worker.worker_id: worker for worker in self.workers if worker.connected}
        return self._by_id.get(worker_id)

    def of(self, model: ServedModel) -> list[Worker]:
        """The workers of `model`, connected ones first; each id once, also where two names lead to one worker."""
        return list(self._model(model).workers.values())

    def view(self, model: ServedModel) -> FleetView:
        """An immutable view of the workers of `model`; the same one as long as nothing changed."""
        return self._model(model).view(self.unanswered)

    @property
    def unanswered(self) -> tuple[str, ...]:
        """Endpoints of unknown role that may still be starting: new ones, and those that say so."""
        if self._silent is None:
            self._silent = [worker for worker in self.workers if worker.snapshot is None]
        if not self._silent:
            return ()
        alive = asyncio.get_running_loop().time() - self._settings.startup_seconds
        return tuple(worker.endpoint for worker in self._silent if worker.alive_at > alive)

    def facts(self, model: ServedModel) -> ModelFacts | None:
        """What the workers of `model` said about it, also those that are down; None: none ever spoke."""
        return self._model(model).facts

    def serves(self, model: ServedModel) -> bool:
        """Whether a request for `model` could be placed now, room aside."""
        view = self.view(model)
        if not any(worker.usable for worker in view.decode):
            return False
        return any(worker.usable for worker in view.prefill) or not (view.prefill or view.unanswered)

    async def hash_prompt(self, model: ServedModel, tokens: tuple[int, ...], salt: str) -> dict[KVLayout, list[bytes]]:
        """Block hashes of `tokens` for each layout that workers of `model` have."""
        layouts = self._model(model).layouts

        def compute() -> dict[KVLayout, list[bytes]]:
            return {layout: block_hashes(root_hash(layout, salt), tokens, layout.block_size) for layout in layouts}

        return compute() if len(tokens) < LONG_PROMPT else await asyncio.to_thread(compute)

    def held(self, model: ServedModel, hashes: Mapping[KVLayout, list[bytes]]) -> dict[str, int]:
        """Worker id -> leading blocks of a prompt in its cache; workers without any are left out."""
        ids, counts = self._model(model).ids, dict[str, int]()
        for layout in hashes:
            for endpoint, count in self._index.leading(hashes[layout]).items():
                if (worker_id := ids.get(endpoint)) is not None:
                    counts[worker_id] = count
        return counts

    def known_blocks(self, worker: Worker) -> int:
        """How many blocks in the worker's cache this router knows of."""
        return self._index.holds(worker.endpoint)

    async def wait_membership(self, timeout: float) -> None:
        """Return when a worker comes, goes or starts to drain, or after `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._members.wait()

    def touched(self, worker: Worker) -> None:
        """What was placed on `worker` changed."""
        for model in self._views.values():
            model.touch(worker)

    def changed(self, worker: Worker | None = None, membership: bool = True) -> None:
        """Tell everybody who waits that the view is another one."""
        if worker is not None:
            self.touched(worker)
        if membership:
            self._views, self._by_id, self._silent = {}, None, None
            if worker is not None:
                self._warn(worker)
            members, self._members = self._members, asyncio.Event()
            members.set()
        for callback in (*self.on_change, *(self.on_membership if membership else ())):
            callback()

    def adopt(self, endpoint: str) -> Worker:
        """One more worker, which somebody else connects to."""
        lease, name = self._settings.lease_seconds, self._names.get(endpoint, "")
        worker = Worker(endpoint, self.router_id, lease, self._index, self, self._dial, self.chance, name)
        self._workers[endpoint], self._silent = worker, None
        return worker

    def follow(self, endpoint: str) -> None:
        """Follow one more worker, by host:port."""
        self._apply({endpoint})

    def _apply(self, endpoints: Set[str], replaced: Set[str] = frozenset()) -> None:
        """Follow `endpoints`; stop following those of `replaced` that are gone and not connected."""
        for endpoint in sorted(endpoints - self._workers.keys()):
            worker = self.adopt(endpoint)
            self._tasks[endpoint] = asyncio.create_task(worker.run(), name=f"worker {endpoint}")
        for endpoint in sorted((replaced - endpoints) & self._workers.keys()):
            if not self._workers[endpoint].connected:
                self._tasks.pop(endpoint).cancel()
                del self._workers[endpoint]
                self._names.pop(endpoint, None)
                self._index.drop(endpoint)
                self.changed()

    def _model(self, model: ServedModel) -> ModelViews:
        views = self._views.get(model.name)
        if views is None:
            members = [w for w in self.workers if w.snapshot and w.snapshot.model in model.aliases]
            views = self._views[model.name] = ModelViews(members, self.unanswered)
        return views

    def _warn(self, worker: Worker) -> None:
        """Say it once where nobody can reach a worker by a model's name."""
        snapshot = worker.snapshot
        if snapshot is None or worker.role is None or snapshot.incarnation in self._warned:
            return
        if self._models.announced_as(snapshot.model) is None:
            self._warned.add(snapshot.incarnation)
            served = [model.name for model in self._models]
            log.warning("worker_without_model", worker_id=worker.worker_id, model=snapshot.model, served=served)

    async def _resolve_always(self) -> None:
        """Names change what they stand for without telling, so they are asked again and again."""
        before: set[str] = set()
        while True:
            now: set[str] = set()
            complete = True
            for host, port in self._targets:
                if _needs_resolving(host):
                    found = await _resolve(host, port, self._settings.resolve_seconds)
                    now |= found
                    self._names |= dict.fromkeys(found, host)
                    complete = complete and bool(found)
            # A name server's outage must not take the fleet away.
            self._apply(now, before if complete else set())
            for endpoint in now - before:
                self._workers[endpoint].retry_now()
            # Who left the name while still connected is followed until it is gone, and looked at again then.
            before = (now | (before & self._workers.keys())) if complete else before | now
            await asyncio.sleep(self._settings.resolve_seconds)


def _needs_resolving(host: str) -> bool:
    if host == "localhost":  # one machine, whatever it resolves to
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


async def _resolve(host: str, port: int, timeout: float) -> set[str]:
    """Endpoints behind a name; empty when it cannot be resolved. IPv4 where there is any: a host is to be met once."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout):
            entries = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError) as error:
        log.warning("name_unresolved", host=host, error=str(error) or "timeout")
        return set()
    addresses = {(family, str(address[0])) for family, _, _, _, address in entries}
    families = {family for family, _ in addresses}
    wanted = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    return {f"{_bracket(address)}:{port}" for family, address in addresses if family is wanted}


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host
