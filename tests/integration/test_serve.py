"""`pdserve serve` as a user starts it: what it refuses, and that nothing outlives it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pdserve.client import NO_RETRIES, Client, Output
from pdserve.core.errors import InvalidRequest, NoCapacity, PdserveError
from tests.integration.scraping import read
from tests.tiny_models import make_tiny_model

PATIENCE = 60.0


@asynccontextmanager
async def pdserve(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The console command as a process of its own session; killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdserve.cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


def flags(model: Path, logs: Path) -> list[str]:
    options = {
        "--model": model, "--port": 0, "--http-port": 0, "--device": "cpu", "--kv-cache-memory": "16MiB",
        "--log-dir": logs,
    }  # fmt: skip
    return [str(part) for option in options.items() for part in option]


async def read_until(process: asyncio.subprocess.Process, pattern: str) -> re.Match[str]:
    """Output up to a line that matches; fails, with what was said, when there is none."""
    assert process.stdout is not None
    said = []
    async with asyncio.timeout(PATIENCE):
        while line := (await process.stdout.readline()).decode():
            said.append(line)
            if match := re.search(pattern, line):
                return match
    raise AssertionError(f"no {pattern!r} in: {''.join(said)}")


def children(pid: int) -> list[int]:
    """Every living descendant of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children(child)]
    return found


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def gone(pids: list[int]) -> None:
    """Wait for the end of processes that are not ours to wait for."""
    loop = asyncio.get_running_loop()
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended = loop.create_future()
        loop.add_reader(descriptor, lambda ended=ended: ended.done() or ended.set_result(None))
        try:
            await asyncio.wait_for(ended, PATIENCE)
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("serve") / "tiny", "llama")


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
async def test_everything_ends_with_it(model: Path, tmp_path: Path, end: signal.Signals) -> None:
    """Ctrl-C, SIGTERM, and even SIGKILL, which it cannot handle: not one process is left."""
    async with pdserve("serve", *flags(model, tmp_path), "--colocated", "1") as process:
        target = (await read_until(process, r"(127\.0\.0\.1:\d+)\s*$|router at (127\.0\.0\.1:\d+)")).group(0)
        endpoint = re.findall(r"127\.0\.0\.1:\d+", target)[-1]
        async with Client(endpoint) as client:
            with pytest.raises(NoCapacity, match="larger than max"):  # not even read
                await client.complete("x" * (40 << 20), max_tokens=1)
            assert len((await client.complete("hello", max_tokens=3, ignore_eos=True)).tokens) == 3
        family = children(process.pid)
        assert len(family) >= 3  # router, decode front, decode engine
        process.send_signal(end)
        await asyncio.wait_for(process.wait(), PATIENCE)
        await gone(family)
        assert not any(map(alive, family))


async def test_a_stop_says_what_it_waits_for_and_a_second_one_does_not_wait(model: Path, tmp_path: Path) -> None:
    """Silence for the seconds of a drain would look like a hang."""
    async with pdserve("serve", *flags(model, tmp_path), "--colocated", "1") as process:
        endpoint = (await read_until(process, r"ready at (127\.0\.0\.1:\d+)"))[1]
        family = children(process.pid)
        async with Client(endpoint, retry=NO_RETRIES) as client:
            with pytest.raises(PdserveError):
                async with client.generate("hello", max_tokens=1000, ignore_eos=True) as events:
                    async for event in events:
                        if isinstance(event, Output) and event.index == 0:
                            process.send_signal(signal.SIGINT)
                            await read_until(process, "draining: 1 request still runs; Ctrl-C again ends it now")
                            process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
        await gone(family)


async def test_targets_are_the_router_s_and_a_stop_with_nothing_to_wait_for_says_so(
    model: Path, tmp_path: Path
) -> None:
    more = ("--colocated", "1", "--slo-ttft-ms", "700", "--slo-itl-ms", "70")
    async with pdserve("serve", *flags(model, tmp_path), *more) as process:
        endpoint = (await read_until(process, r"ready at (127\.0\.0\.1:\d+)"))[1]
        async with Client(endpoint) as client:
            stats = await client.stats()
        assert (stats.ttft_target_ms, stats.itl_target_ms) == (700.0, 70.0)
        process.send_signal(signal.SIGINT)
        await read_until(process, "stopping: no request runs")
        await read_until(process, "stopped")


async def test_a_dead_worker_ends_the_whole_suite(model: Path, tmp_path: Path) -> None:
    more = ("--prefill", "1", "--decode", "1", "--metrics-port", "0")
    async with pdserve("serve", *flags(model, tmp_path), *more) as process:
        await read_until(process, r"127\.0\.0\.1:\d+\s*$")
        metrics = (await read_until(process, r"metrics of router at (http://\S+)$"))[1]
        assert 'role="decode",state="connected"} 1.0' in await read(metrics)
        family = children(process.pid)
        victim = next(pid for pid in family if "pdserve.decode" in command_line(pid))
        os.kill(victim, signal.SIGKILL)
        await read_until(process, "decode-0")
        assert await asyncio.wait_for(process.wait(), PATIENCE) != 0
        await gone(family)


def missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def wrong_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, folder / "model.safetensors")


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def other_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (missing_shard, ["model-00002-of-00002.safetensors"]),
        (wrong_shape, ["model.safetensors", "model.norm.weight", "[63]", "[64]"]),
        (truncated, ["model.safetensors"]),
        (other_architecture, ["MambaForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_a_broken_checkpoint_stops_the_worker_at_start(tmp_path: Path, harm, words: list[str]) -> None:  # type: ignore[no-untyped-def]
    folder = make_tiny_model(tmp_path / "model", "llama")
    harm(folder)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdserve.decode", "--model", str(folder), "--device", "cpu"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode != 0
    assert [word for word in words if word not in said.decode()] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prefill", "1", "--decode", "1", "--colocated", "1"], "colocated"),
        (["--prefill", "1"], "decode"),
        (["--colocated", "1", "--tensor-parallel-size", "2"], "tensor-parallel-size"),
        (["--colocated", "1", "--max-model-len", "4096"], "4096"),
        (["--colocated", "1", "--no-such-option"], "no-such-option"),
    ],
)
async def test_settings_that_cannot_work_are_refused(
    model: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    async with pdserve("serve", *flags(model, tmp_path), *arguments) as process:
        said, _ = await asyncio.wait_for(process.communicate(), PATIENCE)
        assert process.returncode not in (0, None)
        assert words in said.decode()


async def test_a_message_beyond_the_limit_is_refused(model: Path, tmp_path: Path) -> None:
    async with pdserve("serve", *flags(model, tmp_path), "--colocated", "1") as process:
        target = (await read_until(process, r"127\.0\.0\.1:\d+\s*$")).group(0).strip()
        async with Client(target) as client:
            with pytest.raises(InvalidRequest) as error:
                await client.complete("x" * (20 << 20), max_tokens=1)
            assert error.value.field == "text"
            assert "16777216" in error.value.message
            assert "x" * 100 not in str(error.value)
            assert len((await client.complete("hello", max_tokens=3, ignore_eos=True)).tokens) == 3
