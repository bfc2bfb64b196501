"""A suite's life, with services of a few lines in place of the real ones: the same processes, sockets and signals."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from pdserve.core.errors import Unavailable
from pdserve.launch import LaunchEvent, ServicePlan, Suite, SuiteFailed, SuitePlan

SERVICE = """
import json, os, socket, sys, threading
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
launcher = socket.socket(fileno=int(flags["--launcher-fd"]))
def tell(**message):
    launcher.sendall(json.dumps(message).encode() + b"\\n")
print("arguments", *sys.argv[1:], file=sys.stderr, flush=True)
tell(event="bound", endpoint="127.0.0.1:" + flags["--port"])
if "--fail" in flags:
    tell(event="failed", error=flags["--fail"])
    sys.exit(1)
if "--deaf" in flags:
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "--silent" not in flags:
    tell(event="ready", endpoint="127.0.0.1:" + flags["--port"], details={"pid": os.getpid()})
launcher.recv(1)
print("launcher gone", file=sys.stderr, flush=True)
"""


@pytest.fixture(autouse=True)
def fake_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more portion of the namespace package, found by the children: `pdserve.fake`."""
    folder = tmp_path / "portion" / "pdserve"
    folder.mkdir(parents=True)
    (folder / "fake.py").write_text(SERVICE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder.parent), os.environ.get("PYTHONPATH", "")]))


def service(name: str, port: int, *flags: str, cache: int | None = None) -> ServicePlan:
    return ServicePlan("fake", name, ("--port", str(port), *flags), cache)


def suite_of(tmp_path: Path, *workers: ServicePlan, **settings: float) -> Suite:
    plan = SuitePlan((service("cache", 1),), workers, service("router", 9))
    return Suite(plan, log_folder=tmp_path / "logs", **settings)  # type: ignore[arg-type]


async def test_a_suite_starts_in_order_and_stops_whole(tmp_path: Path) -> None:
    """Workers are told their cache, the router its workers and caches; after leaving, no process is left."""
    async with suite_of(tmp_path, service("worker", 2, cache=0)) as suite:
        assert suite.endpoint == "127.0.0.1:9"
        services = suite.services
        assert [one.details["pid"] for one in services] == [one.pid for one in services]
    assert "--prefix-cache 127.0.0.1:1" in (tmp_path / "logs" / "worker.log").read_text()
    router = (tmp_path / "logs" / "router.log").read_text()
    assert "--worker 127.0.0.1:2" in router and "--worker 127.0.0.1:1" in router
    assert [one.returncode for one in services] == [-signal.SIGTERM] * 3
    assert suite.failure is None


async def test_gateways_are_told_the_router_and_stop_with_the_rest(tmp_path: Path) -> None:
    doors = (service("door-0", 21), service("door-1", 22))
    plan = SuitePlan((), (service("worker", 2),), service("router", 9), doors)
    async with Suite(plan, log_folder=tmp_path) as suite:
        assert [one.endpoint for one in suite.gateways] == ["127.0.0.1:21", "127.0.0.1:22"]
        services = suite.services
        assert [one.name for one in services] == ["worker", "router", "door-0", "door-1"]
    assert "--router 127.0.0.1:9" in (tmp_path / "door-1.log").read_text()
    assert [one.returncode for one in services] == [-signal.SIGTERM] * 4


async def test_a_suite_makes_a_secret_for_its_services_and_takes_it_along(tmp_path: Path) -> None:
    """All are told the file but gateways, which are clients."""
    plan = SuitePlan((service("cache", 1),), (service("worker", 2),), service("router", 9), (service("door", 21),))
    suite = Suite(plan, log_folder=tmp_path)
    async with suite:
        path = suite.internal_secret_file
        assert suite.access.secret is not None and suite.access.secret.text == path.read_text()
        assert path.stat().st_mode & 0o077 == 0
    assert not path.parent.exists()
    with pytest.raises(Unavailable):
        _ = suite.access
    told = [
        name for name in ("cache", "worker", "router", "door") if str(path) in (tmp_path / f"{name}.log").read_text()
    ]
    assert told == ["cache", "worker", "router"]


async def test_a_secret_that_was_given_is_used_and_left(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("one-that-somebody-made")
    plan = SuitePlan((), (service("worker", 2),), service("router", 9))
    async with Suite(plan, log_folder=tmp_path, internal_secret_file=tmp_path / "secret") as suite:
        assert suite.access.secret is not None and suite.access.secret.matches("one-that-somebody-made")
    assert (tmp_path / "secret").read_text() == "one-that-somebody-made"


async def test_a_service_that_fails_to_start_is_named_with_its_words_and_log(tmp_path: Path) -> None:
    suite = suite_of(tmp_path, service("good", 2), service("bad", 3, "--fail", "no such model"))
    with pytest.raises(SuiteFailed, match=r"(?s)bad .*no such model.*arguments --port 3"):
        async with suite:
            raise AssertionError("it started")
    assert all(one.returncode is not None for one in suite.services)


async def test_a_module_that_is_not_there_fails_the_start(tmp_path: Path) -> None:
    with pytest.raises(SuiteFailed, match=r"(?s)exit code 1.*No module named pdserve.nothing"):
        async with suite_of(tmp_path, ServicePlan("nothing", "typo", ())):
            raise AssertionError("it started")


async def test_a_start_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(SuiteFailed, match="not ready after"):
        async with suite_of(tmp_path, service("worker", 2, "--silent", "yes"), start_timeout=2.0):
            raise AssertionError("it started")


async def test_one_death_ends_the_suite_and_says_whose(tmp_path: Path) -> None:
    async with suite_of(tmp_path, service("worker", 2), service("victim", 3)) as suite:
        os.kill(suite.workers[1].pid, signal.SIGKILL)
        failure = await asyncio.wait_for(suite.wait_failed(), 10)
        assert "victim" in str(failure) and "SIGKILL" in str(failure)
        assert all(one.returncode is not None for one in suite.services)


async def test_a_death_that_was_asked_for_leaves_the_rest_alone(tmp_path: Path) -> None:
    async with suite_of(tmp_path, service("worker", 2), service("victim", 3)) as suite:
        suite.workers[1].kill()
        await suite.workers[1].exited
        assert suite.workers[0].returncode is None and suite.failure is None


async def test_what_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    async with suite_of(tmp_path, service("worker", 2, "--deaf", "yes"), stop_grace=0.3) as suite:
        worker = suite.workers[0]
    assert worker.returncode == -signal.SIGKILL


async def test_events_reach_the_listener(tmp_path: Path) -> None:
    events: list[LaunchEvent] = []
    plan = SuitePlan((), (service("worker", 2),), service("router", 9))
    async with Suite(plan, log_folder=tmp_path, listener=events.append):
        pass
    assert [event.kind for event in events if event.service == "worker"] == ["bound", "ready", "exited"]
