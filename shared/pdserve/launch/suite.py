"""A suite that runs: every process of a plan, alive together or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pdserve.core.errors import PdserveError, Unavailable
from pdserve.launch.plan import ServicePlan, SuitePlan
from pdserve.launch.process import LaunchEvent, Service
from pdserve.launch.secret_file import SecretFile
from pdserve.rpc.access import Access, access_of

START_TIMEOUT = 600.0  # seconds; big models load from slow disks
STOP_GRACE = 10.0  # seconds between SIGTERM and SIGKILL


class SuiteFailed(PdserveError):
    """A service did not start, or died. The message says which and why, with its last log lines."""


class Suite:
    """Starts a plan on entering, stops all of it on leaving. Nothing is restarted: the first death ends the suite.

    `async with Suite(plan) as suite:` raises SuiteFailed, with everything stopped, when any service fails to get
    ready within `start_timeout` seconds. While it runs, an unexpected death stops the others and resolves
    `wait_failed`. `listener` sees every LaunchEvent, from the event loop; it must not block.
    """

    def __init__(
        self,
        plan: SuitePlan,
        *,
        log_folder: Path | None = None,
        listener: Callable[[LaunchEvent], None] | None = None,
        start_timeout: float = START_TIMEOUT,
        stop_grace: float = STOP_GRACE,
        internal_secret_file: Path | None = None,
    ) -> None:
        """`internal_secret_file` has the secret of this fleet; None: one is made, and gone with the suite."""
        self.plan = plan
        self.caches: list[Service] = []
        self.workers: list[Service] = []
        self.router: Service | None = None
        self.gateways: list[Service] = []
        self.failure: SuiteFailed | None = None
        self._log_folder = log_folder
        self._listener = listener or (lambda event: None)
        self._start_timeout = start_timeout
        self._stop_grace = stop_grace
        self._secret = SecretFile(internal_secret_file)
        self._failed = asyncio.Event()
        self._guard: asyncio.Task[None] | None = None

    @property
    def endpoint(self) -> str:
        """Where clients reach the router, as host:port."""
        if self.router is None:
            raise Unavailable("the suite does not run")
        return self.router.endpoint

    @property
    def services(self) -> list[Service]:
        """Every process, in the order of starting."""
        return [*self.caches, *self.workers, *([self.router] if self.router else []), *self.gateways]

    @property
    def metrics(self) -> dict[str, str]:
        """Where each process exports its metrics, as URLs by name; those that don't are left out."""
        found = {service.name: str(service.details.get("metrics", "")) for service in self.services}
        return {name: url for name, url in found.items() if url}

    @property
    def internal_secret_file(self) -> Path:
        """The file with this fleet's secret. Raises Unavailable where the suite does not run."""
        return self._secret.path

    @property
    def access(self) -> Access:
        """What the suite's workers and caches want to be shown. Raises Unavailable where the suite does not
        run."""
        return access_of(self._secret.path, self.plan.tls.caller if self.plan.tls else None)

    async def __aenter__(self) -> Suite:
        try:
            self._secret.make()
            if self._log_folder:
                self._log_folder.mkdir(parents=True, exist_ok=True)
            async with asyncio.timeout(self._start_timeout):
                await self._start()
        except BaseException as error:
            await self.stop()
            if isinstance(error, Unavailable):
                raise SuiteFailed(str(error)) from None
            if isinstance(error, TimeoutError):
                raise SuiteFailed(f"the suite was not ready after {self._start_timeout:.0f} s") from None
            raise
        self._guard = asyncio.create_task(self._watch(), name="suite guard")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._guard:
            self._guard.cancel()
            await asyncio.wait({self._guard})
        await self.stop()

    async def wait_failed(self) -> SuiteFailed:
        """Wait until a service dies that should not have; the others are stopped by then. May wait for ever."""
        await self._failed.wait()
        assert self.failure is not None
        return self.failure

    def kill(self) -> None:
        """SIGKILL to all, and to what they started; `stop` waits for their end."""
        for service in self.services:
            service.kill()

    async def stop(self) -> None:
        """SIGTERM to all, then SIGKILL to what is left after the grace. Returns once all are gone; may be repeated."""
        for service in self.services:
            service.terminate()
        waits = {service.exited for service in self.services}
        try:
            if waits:
                await asyncio.wait(waits, timeout=self._stop_grace)
        finally:  # also when this wait is cancelled: then at once
            self.kill()
        for service in self.services:
            await service.close()
        self._secret.remove()

    async def _start(self) -> None:
        """Caches first (workers need their endpoints, and they are fast), the router while the workers still load, and
        the gateways as soon as it listens."""
        for plan in self.plan.caches:
            self.caches.append(await self._launch(plan))
        await _all(*(cache.bound() for cache in self.caches))
        for plan in self.plan.workers:
            cache = ["--prefix-cache", self.caches[plan.cache].endpoint] if plan.cache is not None else []
            self.workers.append(await self._launch(plan, cache))
        await _all(*(worker.bound() for worker in self.workers))
        flags = [flag for service in (*self.workers, *self.caches) for flag in ("--worker", service.endpoint)]
        self.router = await self._launch(self.plan.router, flags)
        if self.plan.gateways:
            await self.router.bound()
        for plan in self.plan.gateways:
            self.gateways.append(await self._launch(plan, ["--router", self.router.endpoint]))
        await _all(*(service.ready() for service in self.services))

    async def _launch(self, plan: ServicePlan, more: Sequence[str] = ()) -> Service:
        words = [*plan.arguments, *more]
        if plan not in self.plan.gateways and "--internal-secret-file" not in words:
            words += ["--internal-secret-file", str(self._secret.path)]
        return await Service.start(plan.module, plan.name, words, log_folder=self._log_folder, listener=self._listener)

    async def _watch(self) -> None:
        """Wait for the first death that nobody asked for, then stop the rest."""
        alive = {service.exited: service for service in self.services}
        while alive:
            done, _ = await asyncio.wait(alive, return_when=asyncio.FIRST_COMPLETED)
            dead = [alive.pop(task) for task in done]
            unexpected = [service for service in dead if not service.expected_to_end]
            if unexpected:
                for service in unexpected:
                    await service.close()
                self.failure = SuiteFailed("\n".join(service.obituary() for service in unexpected))
                try:
                    await self.stop()
                finally:
                    self._failed.set()
                return


async def _all(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait for all; the first failure cancels the rest and is raised as it is."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        for next_done in asyncio.as_completed(tasks):
            await next_done
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
