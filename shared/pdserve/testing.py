"""Cluster: every service as a real process on a free loopback port, for tests and notebooks.

async with Cluster(model_folder, prefill=1, decode=1) as cluster:
    answer = await cluster.client.complete("Once upon a time", max_tokens=8)
    await cluster.assert_all_free()
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc.aio

from pdserve.client import NO_RETRIES, Client
from pdserve.core.errors import Unavailable
from pdserve.launch import Machine, ModelPart, Service, Suite, TlsFiles, WorkerOptions, plan_suite
from pdserve.launch.models import model_part
from pdserve.rpc.access import PLAIN, Access
from pdserve.rpc.channel import connect
from pdserve.rpc.versions import our_versions
from pdserve.v1 import worker_pb2
from pdserve.v1.worker_pb2_grpc import WorkerServiceStub

KV_CACHE_MEMORY = 64 << 20  # plenty for tiny models, and quick to get
START_TIMEOUT = 120.0
DEADLINE = 30.0  # seconds until every block must be back


class Cluster:
    """A suite with a client. Entering starts it, leaving stops it and raises SuiteFailed if any part died unasked.

    `models` is a folder, or ModelParts for several models or counts of their own. `options` are WorkerOptions'
    fields; `per_worker` overrides single flags of single services: {"decode-0": {"kv-cache-memory": 1 << 20}}.
    Logs go to `log_folder`, or to a folder that is deleted at the end. With `metrics` every service exports its own.
    With `tls` all of them listen with it, and call one another so.
    """

    def __init__(
        self,
        models: Path | Sequence[ModelPart],
        *,
        prefill: int = 0,
        decode: int = 0,
        colocated: int = 0,
        prefix_caches: int = 0,
        gateways: int = 0,
        metrics: bool = False,
        tls: TlsFiles | None = None,
        per_worker: Mapping[str, Mapping[str, object]] | None = None,
        log_folder: Path | None = None,
        **options: Any,
    ) -> None:
        if isinstance(models, Path):
            if not (prefill or decode or colocated):
                prefill = decode = 1
            models = [model_part(models, models.name, prefill, decode, colocated)]
        elif prefill or decode or colocated:
            raise ValueError("ModelParts bring counts of their own")
        workers = WorkerOptions(**{"device": "cpu", "kv_cache_memory": KV_CACHE_MEMORY, **options})
        self._plan = plan_suite(
            models,
            Machine.here(),
            workers,
            prefix_caches=prefix_caches,
            gateways=gateways,
            metrics_port=0 if metrics else None,
            per_worker=per_worker,
            tls=tls,
        )
        self._log_folder = log_folder
        self._stack = AsyncExitStack()
        self.suite: Suite
        self.client: Client
        """A client of the router, closed with the cluster. It never retries, so that each refusal is seen;
        `Client(cluster.endpoint)` makes another."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            folder = self._log_folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-")))
            suite = Suite(self._plan, log_folder=folder, start_timeout=START_TIMEOUT)
            self.suite = await stack.enter_async_context(suite)
            self.client = await stack.enter_async_context(
                Client(self.suite.endpoint, retry=NO_RETRIES, tls=suite.access.tls)
            )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = self.suite.failure
        await self._stack.aclose()
        if failure is not None and error is None:
            raise failure

    @property
    def endpoint(self) -> str:
        """The router's host:port."""
        return self.suite.endpoint

    @property
    def http(self) -> str:
        """The first gateway's URL. Unavailable where there is none."""
        if not self.suite.gateways:
            raise Unavailable("this cluster has no gateway: ask for one with gateways=1")
        scheme = "https" if self._plan.tls else "http"
        return f"{scheme}://{self.suite.gateways[0].endpoint}"

    @property
    def metrics(self) -> dict[str, str]:
        """Where each service exports its metrics, as URLs by name: "router", "decode-0", ..."""
        return self.suite.metrics

    @property
    def workers(self) -> dict[str, Service]:
        """Prefill and decode workers by name: "prefill-0", "decode-0", ..."""
        return {service.name: service for service in self.suite.workers}

    @property
    def access(self) -> Access:
        """What the workers and caches want to be shown: for `connect` and `wait_load`."""
        return self.suite.access

    async def kill(self, worker: str) -> None:
        """SIGKILL a worker and what it started, and wait until it is gone. The rest runs on."""
        service = self.workers[worker]
        service.kill()
        await service.exited

    async def assert_all_free(self, timeout: float = DEADLINE) -> None:
        """Wait until no living worker has a block that is owned or reserved. AssertionError after `timeout` seconds.

        Asks the workers themselves, each by one Watch stream, and waits for what they tell.
        """
        living = [service for service in self.suite.workers if service.returncode is None]
        await asyncio.gather(*(wait_all_free(service.endpoint, timeout, self.access) for service in living))


async def wait_all_free(endpoint: str, timeout: float = DEADLINE, access: Access = PLAIN) -> None:
    """Wait until each block of a worker is free or cached; errors as in `wait_load`."""
    await wait_load(endpoint, lambda load: not load.owned_blocks + load.reserved_blocks, timeout, access)


async def wait_load(
    endpoint: str,
    until: Callable[[worker_pb2.WorkerLoad], bool],
    timeout: float = DEADLINE,
    access: Access = PLAIN,
) -> None:
    """Watch one worker or prefix cache until its load is as `until` wants it. The call carries `access`.

    AssertionError when it is not in time, or when a worker's blocks don't add up; Unavailable when it goes away.
    """
    load, total = worker_pb2.WorkerLoad(), 0
    async with connect(endpoint, access) as channel:
        hello = worker_pb2.WatchRequest(protocol=our_versions())
        call = WorkerServiceStub(channel).Watch(hello)
        try:
            async with asyncio.timeout(timeout):
                async for event in call:
                    if event.HasField("snapshot"):
                        cache = event.snapshot.role == worker_pb2.ROLE_PREFIX_CACHE  # its blocks come and go
                        total = 0 if cache else event.snapshot.total_blocks
                        continue
                    load = event.delta.load
                    blocks = (load.free_blocks, load.cached_blocks, load.owned_blocks, load.reserved_blocks)
                    assert sum(blocks) == total or not total, f"{endpoint}: {load} of {total}"
                    if until(load):
                        return
        except TimeoutError:
            raise AssertionError(f"{endpoint} is not as it should be after {timeout} s: {load}") from None
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"{endpoint} went away: {error.details()}") from None
        finally:
            call.cancel()
    raise Unavailable(f"{endpoint} ended its Watch stream")
