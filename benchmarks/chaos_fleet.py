"""Services that a monkey may kill: each comes back on its own port, with its own flags."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from pdserve.launch import Machine, ModelPart, Service, WorkerOptions, plan_suite

PREFILL, DECODE, ROUTERS = 2, 3, 2
STOPPED = 5.0  # seconds of a SIGSTOP
BACK = 60.0  # seconds after which a service that was started again is taken for one that never will
HARMS = ("kill", "kill", "stop", "terminate")
# Of who serves. Each would have a machine of its own; here nine share two cores, and who starts would wait for all.
SERVING_NICE = 10


@dataclass(eq=False)
class Member:
    """One place of the fleet, and the service that fills it now. `up`: it is ready, and nobody holds it."""

    module: str
    name: str
    flags: tuple[str, ...]
    endpoint: str
    service: Service | None = None
    up: bool = False
    harmed: dict[str, int] = field(default_factory=dict)


class ChaosFleet:
    """2 routers, 2 prefill, 3 decode workers and a prefix cache, without a launcher that ends all with one of them."""

    def __init__(self, model: Path, logs: Path, *router_flags: str, log_level: str = "warning") -> None:
        self._logs = logs
        self._healing: list[asyncio.Task[None]] = []
        self.away: list[float] = []  # seconds from a death until somebody served in that place again
        self.members: list[Member] = []
        ports = {name: _free_port() for name in self._names()}
        options = WorkerOptions(
            device="cpu", dtype="float32", threads=1, kv_cache_memory=64 << 20, block_size=16,
            max_num_batched_tokens=256, log_level=log_level,
        )  # fmt: skip
        plan = plan_suite(
            [ModelPart(model, "tiny", prefill=PREFILL, decode=DECODE)], Machine.here(), options, prefix_caches=1,
            per_worker={name: {"port": port, "cores": None} for name, port in ports.items() if name[0] in "pd"
                        and not name.startswith("prefix")},
        )  # fmt: skip
        cache = f"127.0.0.1:{ports['prefix-cache-0']}"
        capacity = ("--worker-id", "prefix-cache-0", "--capacity", str(64 << 20))
        self._add("prefix_cache", "prefix-cache-0", (*capacity, "--port", str(ports["prefix-cache-0"])), ports)
        for worker in plan.workers:
            self._add(worker.module, worker.name, (*worker.arguments, "--prefix-cache", cache), ports)
        workers = [flag for member in self.members for flag in ("--worker", member.endpoint)]
        for index in range(ROUTERS):
            name = f"router-{index}"
            settings = ("--startup-seconds", "3", "--log-level", log_level, "--port", str(ports[name]))
            flags = ("--model", f"tiny={model}", *workers, *settings, *router_flags)
            self._add("router", name, flags, ports)

    @staticmethod
    def _names() -> list[str]:
        counts = {"prefill": PREFILL, "decode": DECODE, "router": ROUTERS, "prefix-cache": 1}
        return [f"{kind}-{index}" for kind, count in counts.items() for index in range(count)]

    def _add(self, module: str, name: str, flags: tuple[str, ...], ports: dict[str, int]) -> None:
        self.members.append(Member(module, name, flags, f"127.0.0.1:{ports[name]}"))

    async def __aenter__(self) -> Self:
        await asyncio.gather(*(self._start(member) for member in self.members if member.module != "router"))
        await asyncio.gather(*(self._start(member) for member in self.members if member.module == "router"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        services = [member.service for member in self.members if member.service is not None]
        for service in services:
            service.kill()
        await asyncio.gather(*(service.close() for service in services))

    @property
    def routers(self) -> list[str]:
        return [member.endpoint for member in self.members if member.module == "router"]

    @property
    def workers(self) -> list[str]:
        return [member.endpoint for member in self.members if member.module in ("prefill", "decode")]

    async def harm(self, chance: random.Random) -> str:
        """Do one of HARMS to somebody whose role has another one that is up; the prefix cache has none, and is spared
        nothing. Returns what was done, at once; the wounded comes back by itself."""
        able = [member for member in self.members if member.up and self._spared(member)]
        if not able:
            return ""
        member, how = chance.choice(able), chance.choice(HARMS)
        member.up = False
        member.harmed[how] = member.harmed.get(how, 0) + 1
        self._healing.append(asyncio.create_task(self._heal(member, how), name=f"{how} {member.name}"))
        return f"{how} {member.name}"

    async def restart(self, member: Member) -> int:
        """Terminate a service, and start it again when it has ended, as an operator would. The status that it ended
        with."""
        service = member.service
        assert service is not None
        member.up = False
        service.terminate()
        await service.close()
        await self._start(member)
        assert service.returncode is not None
        return service.returncode

    async def healed(self) -> None:
        """Wait until everybody is up. Raises what kept one from coming back."""
        await asyncio.gather(*self._healing)
        assert all(member.up for member in self.members)

    def _spared(self, member: Member) -> bool:
        """Whether its role goes on without it."""
        return member.module == "prefix_cache" or any(
            other.up for other in self.members if other.module == member.module and other is not member
        )

    async def _heal(self, member: Member, how: str) -> None:
        service, began = member.service, time.monotonic()
        assert service is not None
        service.expected_to_end = True
        if how == "stop":
            os.killpg(service.pid, signal.SIGSTOP)
            await asyncio.sleep(STOPPED)
            os.killpg(service.pid, signal.SIGCONT)
            member.up = True
            return
        if how == "kill":
            service.kill()
        else:
            service.terminate()
        await service.close()
        began = began if how == "kill" else time.monotonic()
        await self._start(member)
        away = time.monotonic() - began
        print(f"{member.name} is back after {away:.1f} s", file=sys.stderr, flush=True)
        self.away.append(away)

    async def _start(self, member: Member) -> None:
        member.service = await Service.start(
            member.module, member.name, member.flags, log_folder=self._logs, listener=lambda event: None
        )
        async with asyncio.timeout(BACK):
            await member.service.ready()
        _go_behind(member.service.pid)
        member.up = True


def _go_behind(group: int) -> None:
    """Let a service, its engine process and all their threads go behind who starts."""
    os.setpriority(os.PRIO_PGRP, group, SERVING_NICE)
    # Linux may share cores among sessions first, and each service has one of its own.
    with contextlib.suppress(OSError):
        Path(f"/proc/{group}/autogroup").write_text(str(SERVING_NICE), encoding="ascii")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
