"""compose.yaml for real: images from this tree, the default suite up, asked, scaled, hurt, and taken down.

Skips where no engine can be had, and says why. Images stay with an engine that was here before; the rest goes.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pdserve.client import Client, Completion, Finish, FleetWorker, Output
from tests.e2e.containers import PROJECT, ROOT, Containers
from tests.e2e.docker_engine import COMPOSES, NoEngine, docker_engine, has_compose

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

MODEL = "smollm2-135m-instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
ANSWER = "The capital of France is Paris."
LONG = 96  # tokens: seconds on any CPU
SHOWN = 8  # tokens that a client has seen when its worker is killed
FLEET_SECONDS = 300.0  # until a worker has loaded its model; slow machines that do other work need minutes


@pytest.mark.parametrize("compose", COMPOSES, ids=" ".join)
@pytest.mark.parametrize("profiles", ["cpu", "gpu", "observability", "none"])
def test_compose_takes_the_file(compose: tuple[str, ...], profiles: str) -> None:
    """Both Composes do, with each profile and without any. They ask no engine."""
    if not has_compose(compose):
        pytest.skip(f"`{' '.join(compose)}` is not installed")
    environment = {**os.environ, "COMPOSE_PROFILES": "" if profiles == "none" else profiles}
    command = [*compose, "config", "--quiet"]
    checked = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    """The default suite, up and healthy, as `docker compose up` brings it up."""
    try:
        with docker_engine() as engine:
            suite = Containers(engine, tmp_path_factory.mktemp("suite"))
            suite.down()  # what a run that was killed may have left
            began = time.monotonic()
            suite.build()
            built = time.monotonic()
            try:
                suite.up()
                suite.wait_healthy("gateway")
                print(f"images in {built - began:.0f} s, healthy after another {time.monotonic() - built:.0f} s")
                yield suite
            finally:
                suite.down()
    except NoEngine as reason:
        pytest.skip(f"no containers here: {reason}")


@pytest.fixture
def router(containers: Containers) -> str:
    return containers.endpoint("router", 50051)


async def fleet_of(client: Client, role: str, count: int) -> list[FleetWorker]:
    """The connected workers of a role, once there are `count`. A router pushes no news of its fleet, so it is asked."""
    deadline = time.monotonic() + FLEET_SECONDS
    while True:
        workers = [worker for worker in await client.fleet() if worker.connected and worker.role == role]
        if len(workers) == count:
            return workers
        assert time.monotonic() < deadline, f"{len(workers)} {role} workers instead of {count}: {workers}"
        await asyncio.sleep(0.3)


async def assert_all_free(client: Client) -> None:
    """Wait until no connected worker owns or reserves a block."""
    deadline = time.monotonic() + FLEET_SECONDS
    while held := [w for w in await client.fleet() if w.connected and w.owned_blocks + w.reserved_blocks]:
        assert time.monotonic() < deadline, f"blocks stay owned: {held}"
        await asyncio.sleep(0.3)


async def long_answer(client: Client) -> Completion:
    """LONG greedy tokens."""
    return await client.complete("Once upon a time", temperature=0.0, max_tokens=LONG, ignore_eos=True)


def sse(endpoint: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a streamed chat completion, up to [DONE]."""
    connection = http.client.HTTPConnection(endpoint, timeout=120)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        lines = [line.decode().strip() for line in response]
        assert response.status == 200, lines
    finally:
        connection.close()
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data.pop() == "[DONE]"
    return [json.loads(chunk) for chunk in data]


def test_every_service_is_healthy_and_nobody_is_root(containers: Containers) -> None:
    """The parts that .env asks for and no others; each runs by the least rights that it needs."""
    counts = {"prefix-cache": 1, "router": 1, "gateway": 1, "prefill": 1, "decode": 2, "prefill-gpu": 0}
    for service, count in counts.items():
        found = containers.inspect(service)
        assert len(found) == count, service
        for container in found:
            assert container["State"]["Health"]["Status"] == "healthy", service
            assert container["Config"]["User"] == "10001:10001"
            host = container["HostConfig"]
            assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and host["Init"]
            for bindings in (container["NetworkSettings"]["Ports"] or {}).values():
                assert {binding["HostIp"] for binding in bindings or ()} <= {"127.0.0.1"}, service
    (model,) = containers.inspect("model")
    assert model["State"]["Status"] == "exited" and model["State"]["ExitCode"] == 0


@pytest.mark.parametrize("service", ["prefill", "decode"])
def test_workers_attend_by_what_they_compiled_for_this_processor(containers: Containers, service: str) -> None:
    said = [line.partition("| ")[2] for line in containers.logs(service, lines=1000).splitlines() if '"ready"' in line]
    assert len(said) == len(containers.inspect(service))
    for line in said:
        assert json.loads(line)["attention"].startswith("native"), line


def test_the_base_image_is_small_and_has_no_torch(containers: Containers) -> None:
    def layers(image: str) -> int:
        return int(containers.docker("image", "inspect", "--format", "{{.Size}}", image))

    base, cpu = layers(f"{PROJECT}:base"), layers(f"{PROJECT}:cpu")
    print(f"images: base {base / 1e6:.0f} MB, cpu {cpu / 1e6:.0f} MB, with Python's own")
    assert base < cpu / 2
    found = containers.docker(
        *("run", "--rm", "--network", "none", f"{PROJECT}:base", "python", "-c"),
        "import importlib.util as u; print([n for n in ('torch', 'pip', 'numpy') if u.find_spec(n)])",
    )
    assert found.strip() == "[]"


async def test_grpc_and_http_stream_the_same_answer(containers: Containers, router: str) -> None:
    async with Client(router) as client:
        events = [event async for event in client.generate(QUESTION, temperature=0.0, max_tokens=32)]
        text = "".join(event.text for event in events if isinstance(event, Output))
        assert text == ANSWER and len(events) > 4
        finish = events[-1]
        assert isinstance(finish, Finish) and finish.usage.prefill_worker and finish.usage.decode_worker
        body = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 32, "stream": True}
        chunks = await asyncio.to_thread(sse, containers.endpoint("gateway", 8000), body)
        parts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
        assert "".join(parts) == ANSWER and len(parts) > 4
        await assert_all_free(client)


def test_the_command_in_the_container_prints_an_answer(containers: Containers) -> None:
    """What `make up` ends with."""
    words = ("pdserve", "generate", str(QUESTION[0]["content"]), "--chat", "--temperature", "0", "--max-tokens", "32")
    assert containers.compose("exec", "-T", "router", *words).strip() == ANSWER


async def test_an_answer_survives_its_decode_worker(containers: Containers, router: str) -> None:
    """SIGKILL for the container that decodes, in mid-answer: the rest comes from the other, token for token."""
    async with Client(router) as client:
        await fleet_of(client, "decode", 2)
        expected = await long_answer(client)
        assert expected.finish.usage.replays == 0
        addresses = await asyncio.to_thread(decode_addresses, containers)
        tokens: list[int] = []
        victim, finish = "", None
        async for event in client.generate("Once upon a time", temperature=0.0, max_tokens=LONG, ignore_eos=True):
            if isinstance(event, Output):
                tokens += event.token_ids
            if isinstance(event, Finish):
                finish = event
            if not victim and len(tokens) >= SHOWN:
                (busy,) = [worker for worker in await fleet_of(client, "decode", 2) if worker.owned_blocks]
                victim = busy.worker_id
                await asyncio.to_thread(containers.docker, "kill", addresses[busy.endpoint.rpartition(":")[0]])
        assert victim and finish is not None
        assert tokens == expected.token_ids
        assert finish.usage.replays >= 1 and finish.usage.decode_worker != victim
        await fleet_of(client, "decode", 1)
        await assert_all_free(client)
        await asyncio.to_thread(containers.up)
        assert victim not in {worker.worker_id for worker in await fleet_of(client, "decode", 2)}


def decode_addresses(containers: Containers) -> dict[str, str]:
    """Ids of the decode containers by their address."""
    return {
        network["IPAddress"]: container["Id"]
        for container in containers.inspect("decode")
        for network in container["NetworkSettings"]["Networks"].values()
    }


async def test_a_third_decode_worker_is_found_without_a_restart(containers: Containers, router: str) -> None:
    """And, scaled down again, the one that goes drains: nobody's answer is disturbed."""
    (before,) = containers.inspect("router")
    async with Client(router) as client:
        two = {worker.worker_id for worker in await fleet_of(client, "decode", 2)}
        await asyncio.to_thread(containers.up, "--scale", "decode=3")
        (third,) = {worker.worker_id for worker in await fleet_of(client, "decode", 3)} - two
        answers = await asyncio.gather(*(long_answer(client) for _ in range(3)))
        assert third in {answer.finish.usage.decode_worker for answer in answers}
        going = [asyncio.create_task(long_answer(client)) for _ in range(3)]
        await asyncio.to_thread(containers.up, "--scale", "decode=2")
        rest = await asyncio.gather(*going)
        assert {tuple(answer.token_ids) for answer in (*answers, *rest)} == {tuple(answers[0].token_ids)}
        await fleet_of(client, "decode", 2)
        await assert_all_free(client)
    (after,) = containers.inspect("router")
    assert after["Id"] == before["Id"] and after["State"]["StartedAt"] == before["State"]["StartedAt"]


def test_down_leaves_nothing(containers: Containers) -> None:
    """Last, because the suite is gone then. Each service ended by itself, within its grace."""
    containers.compose("stop", timeout=240)
    for service in ("gateway", "router", "prefill", "decode", "prefix-cache"):
        for container in containers.inspect(service):
            assert container["State"]["ExitCode"] == 0, service
    containers.down()
    assert containers.left() == []
