"""The load harness against a live suite, over gRPC and over the gateway's HTTP: it measures what was asked for."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pdserve.bench.figures import OUTSIDE
from pdserve.bench.load import Load
from pdserve.bench.plan import Measured, Plan
from pdserve.bench.prompts import Prompts, plain_ids
from pdserve.bench.record import Record
from pdserve.bench.runner import Run, Runner
from pdserve.bench.session import Bench
from pdserve.bench.target import Asking, Facts, Target, connect
from pdserve.core.errors import ConfigError, Unavailable
from pdserve.core.slo import SloTargets
from pdserve.launch import ModelPart
from pdserve.simulator.workload import Arrival
from pdserve.testing import Cluster
from tests.integration.suites import BLOCK, serve
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

LOOSE = SloTargets(ttft=60.0, itl=60.0, itl_percentile=99.0)  # whatever the machine does meanwhile
MAX_MODEL_LEN = 256
WAYS = ("grpc", "http")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """1 router, 1 prefill, 1 decode, 1 gateway."""
    folder = tmp_path_factory.mktemp("bench")
    part = ModelPart(make_tiny_model(folder / "tiny"), "tiny", prefill=1, decode=1)
    async with serve(folder / "logs", part, gateways=1, max_model_len=MAX_MODEL_LEN) as cluster:
        yield cluster
        await cluster.assert_all_free()


def place(cluster: Cluster, way: str) -> str:
    return cluster.endpoint if way == "grpc" else cluster.http


async def measured(cluster: Cluster, way: str, load: Load, salt: str, **options: Any) -> Measured:
    async with connect(place(cluster, way), Asking(salt=salt)) as target:
        bench = Bench(target, Plan(load, LOOSE, warmup=2, vocab=VOCAB_SIZE, **options))
        await bench.prepare()
        assert bench.facts == Facts("tiny", MAX_MODEL_LEN, VOCAB_SIZE if way == "grpc" else None)
        return await bench.measure()


@pytest.mark.parametrize("way", WAYS)
async def test_lengths_are_exact_and_every_gap_is_seen(cluster: Cluster, way: str) -> None:
    """Also where tokens add no text, so that a stream of text alone would hide them."""
    load = Load(requests=12, rate=20.0, mix=((0.7, 40, 9), (0.3, 150, 5)))
    run = await measured(cluster, way, load, "lengths")
    assert [record.error for record in run.records] == [None] * 12
    for record in run.records:
        assert record.told is not None and record.told.prompt_tokens == record.arrival.prompt
        assert record.tokens == record.told.completion_tokens == record.arrival.output == len(record.ids)
        assert len(record.gaps) == record.arrival.output - 1
    figures = run.figures
    assert figures is not None
    assert (figures.attainment, figures.errors, figures.assumed_tokens) == (1.0, {}, 0)
    assert figures.itl_ms.count == sum(record.arrival.output - 1 for record in run.records)
    assert bool(figures.stages_ms) == (way == "grpc")


async def test_both_ways_the_same_tokens(cluster: Cluster) -> None:
    """Greedy answers to the same prompts: what is measured over HTTP is the work that is measured over gRPC."""
    load = Load(requests=4, streams=1, mix=((1.0, 30, 6),))
    one, other = [await measured(cluster, way, load, "same") for way in WAYS]
    assert [record.ids for record in one.records] == [record.ids for record in other.records]


async def test_stages_and_the_rest_make_the_time_to_first_token(cluster: Cluster) -> None:
    run = await measured(cluster, "grpc", Load(requests=3, streams=1, mix=((1.0, 30, 4),)), "stages")
    assert run.figures is not None
    assert {"queue", "reserve", "prefill", "decode_wait", OUTSIDE} <= run.figures.stages_ms.keys()
    for record in run.records:
        assert record.told is not None and record.told.stages is not None and record.ttft is not None
        stages = record.told.stages
        assert 0 < stages.queue_ms + stages.reserve_ms + stages.prefill_ms <= 1e3 * record.ttft


@pytest.mark.parametrize("way", WAYS)
async def test_later_turns_hit_the_prefix_cache(cluster: Cluster, way: str) -> None:
    """Their prompts begin with what was said, the real answer included, so at least the last prompt's blocks are
    cached; and a first turn finds nothing but the system prompt."""
    load = Load(requests=9, streams=1, mix=((1.0, 40, 10),), turns=3, system=2 * BLOCK)
    run = await measured(cluster, way, load, f"turns-{way}")
    talks: dict[int | None, list[Record]] = {}
    for record in run.records:
        assert record.error is None and record.told is not None
        talks.setdefault(record.arrival.session, []).append(record)
    assert max(map(len, talks.values())) == 3
    for talk in talks.values():
        for before, after in itertools.pairwise(talk):
            assert after.arrival.prompt == before.arrival.prompt + 10 + 40
            assert after.told is not None
            assert after.told.cached_tokens >= before.arrival.prompt // BLOCK * BLOCK
    first, *others = (talk[0].told.cached_tokens for talk in talks.values() if talk[0].told)
    assert first == 0 and all(cached <= 2 * BLOCK for cached in others)


@pytest.mark.parametrize("way", WAYS)
async def test_another_salt_finds_nothing_cached(cluster: Cluster, way: str) -> None:
    """The same seed twice: the second run would otherwise be measured on the first one's KV."""
    load = Load(requests=2, streams=1, mix=((1.0, 64, 2),))
    cached = []
    for salt in ("one", "one", "two"):
        run = await measured(cluster, way, load, f"{salt}-{way}")
        cached.append([record.told.cached_tokens for record in run.records if record.told])
    assert cached[0] == cached[2] == [0, 0] and min(cached[1]) >= BLOCK


@pytest.mark.parametrize(("way", "code"), [("grpc", "INVALID_ARGUMENT"), ("http", "HTTP 400")])
async def test_errors_are_counted_and_others_answered(cluster: Cluster, way: str, code: str) -> None:
    """A prompt without room fails with the server's own words; its neighbours do not notice."""
    arrivals = [Arrival(0.0, 20, 3), Arrival(0.0, MAX_MODEL_LEN + 1, 3), Arrival(0.01, 21, 3)]
    run = await driven(cluster, way, arrivals)
    good, bad, also_good = run.records
    assert good.error is None and also_good.error is None
    assert bad.error is not None and bad.error.startswith(f"{code}: ") and bad.tokens == 0


@pytest.mark.parametrize("way", WAYS)
async def test_a_request_that_takes_too_long_is_cancelled(cluster: Cluster, way: str) -> None:
    """On the server, too: its blocks are free again."""
    run = await driven(cluster, way, [Arrival(0.0, 20, 200)], timeout=0.02)
    assert run.records[0].error is not None and run.records[0].error.startswith("DEADLINE_EXCEEDED")
    await cluster.assert_all_free()


@pytest.mark.parametrize("way", WAYS)
async def test_a_closed_loop_holds_its_number_in_flight(cluster: Cluster, way: str) -> None:
    counted: list[int] = []
    arrivals = [Arrival(0.0, 20, 6) for _ in range(15)]
    run = await driven(cluster, way, arrivals, streams=4, counted=counted)
    assert [record.error for record in run.records] == [None] * 15
    assert max(counted) == 4
    # From the fourth on a request begins when another has ended, as long as there are any.
    assert counted[3:] == [4] * 12


async def test_the_command(cluster: Cluster, tmp_path: Path) -> None:
    """Figures on stdout, and in the file every request; a run that the client could not have seen has none."""
    command = ["--target", cluster.endpoint, "--mix", "50% 20/5 + 50% 60/3", "--requests", "8", "--rate", "4"]
    loose = ["--ttft-ms", "60000", "--itl-ms", "60000", "--warmup", "1"]
    file, picture = tmp_path / "a.json", tmp_path / "a.html"
    pids = [part for worker in cluster.suite.workers for part in ("--pid", str(worker.pid))]
    costs = ["--cores", "2", *pids, "--output", str(file), "--plot", str(picture)]
    code, said, problem = await pdserve(*command, *loose, *costs, "--json")
    assert code == 0, problem
    shown, kept = json.loads(said), json.loads(file.read_text())
    requests = kept.pop("requests")
    assert shown == kept
    assert (shown["pdserve_bench"], shown["model"], shown["load"]["rate"]) == (1, "tiny", 4.0)
    figures = shown["figures"]
    assert (figures["requests"], figures["attainment"], figures["errors"]) == (8, 1.0, {})
    assert figures["goodput_per_core"] == pytest.approx(figures["goodput"] / 2)
    assert figures["core_seconds_per_request"] == pytest.approx(2 * figures["seconds"] / 8)
    assert figures["cpu_seconds_per_request"] > 0
    assert {(row["prompt_tokens"], row["output_tokens"]) for row in requests} == {(20, 5), (60, 3)}
    for row in requests:
        assert {"at", "ttft_ms", "itl_ms", "e2e_ms", "session", "error"} <= row.keys()
        assert row["error"] is None and len(row["itl_ms"]) == row["output_tokens"] - 1
    assert picture.stat().st_size > 10_000

    code, said, problem = await pdserve(
        *command, "--ttft-ms", "0.001", "--warmup", "0", "--json", "--output", str(file)
    )
    assert code == 1 and "nothing is reported, for the client was the bottleneck" in problem
    assert "figures" not in json.loads(said) and not json.loads(file.read_text())["requests"]
    assert "ttft" not in said.replace("ttft_ms", "", 1)  # but for the target
    assert "figures" not in json.loads(said) and "of 0.001 ms TTFT" in json.loads(said)["refused"]


async def test_the_command_finds_a_rate(cluster: Cluster) -> None:
    """Every rate keeps loose targets, so it doubles as often as it may, and says that this is not the end."""
    load = ["--prompt-tokens", "16", "--output-tokens", "2", "--requests", "4", "--rate", "8", "--warmup", "0"]
    search = ["--find-rate", "--max-runs", "2", "--ttft-ms", "60000", "--itl-ms", "60000"]
    code, said, problem = await pdserve("--target", cluster.http, "--vocab", str(VOCAB_SIZE), *load, *search)
    assert code == 0, problem
    assert (
        "16.000 a second is the highest rate" in said and "exact than it should be: 2 runs were not enough" in problem
    )


@pytest.mark.parametrize("way", WAYS)
async def test_a_model_that_nobody_serves(cluster: Cluster, way: str) -> None:
    async with connect(place(cluster, way), Asking(model="nobody")) as target:
        with pytest.raises(ConfigError, match="--model must be one of tiny"):
            await target.facts()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "http://127.0.0.1:1"])
async def test_nobody_there(address: str) -> None:
    async with connect(address, Asking()) as target:
        with pytest.raises(Unavailable):
            await target.facts()


class Counting:
    """A target that notes how many requests it has at the beginning of each."""

    def __init__(self, target: Target, counted: list[int]) -> None:
        self._target, self._counted, self._now = target, counted, 0

    async def facts(self) -> Facts:
        return await self._target.facts()

    async def ask(self, prompt: Sequence[int], record: Record) -> None:
        self._now += 1
        self._counted.append(self._now)
        try:
            await self._target.ask(prompt, record)
        finally:
            self._now -= 1


async def driven(
    cluster: Cluster,
    way: str,
    arrivals: Sequence[Arrival],
    *,
    streams: int | None = None,
    timeout: float = 60.0,
    counted: list[int] | None = None,
) -> Run:
    """A run without plan and figures."""
    async with connect(place(cluster, way), Asking(salt="driven")) as target:
        await target.facts()
        runner = Runner(
            Counting(target, [] if counted is None else counted), Prompts(0, plain_ids(VOCAB_SIZE)), timeout
        )
        return await (runner.open_loop(arrivals) if streams is None else runner.closed_loop(arrivals, streams))


async def pdserve(*arguments: str) -> tuple[int | None, str, str]:
    """`pdserve bench` as a process of its own: code, stdout, stderr."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdserve.cli", "bench", *arguments, stdout=pipe, stderr=pipe
    )
    said, problem = await process.communicate()
    return process.returncode, said.decode(), problem.decode()
