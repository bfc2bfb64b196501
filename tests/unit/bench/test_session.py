"""A measurement from its beginning to its result: warm-up, vocabulary, search, and what makes it no result."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.bench.load import Load
from pdserve.bench.plan import Measured, Plan
from pdserve.bench.record import Record
from pdserve.bench.report import LATENCIES, RUNS, figure_rows, latency_rows, request_row, result, run_rows
from pdserve.bench.session import Bench, Progress
from pdserve.bench.target import Facts
from pdserve.core.errors import ConfigError, PdserveError
from pdserve.core.slo import SloTargets
from tests.unit.bench.targets import Holding, Limited, Reciter

EASY = SloTargets(ttft=60.0, itl=60.0, itl_percentile=99.0)
HARD = SloTargets(ttft=1e-6, itl=60.0, itl_percentile=99.0)
LOAD = Load(requests=20, rate=400.0, mix=((0.5, 20, 3), (0.5, 9, 1)))


def plan(load: Load = LOAD, targets: SloTargets = EASY, **options: Any) -> Plan:
    return Plan(**{"load": load, "targets": targets, "warmup": 3, **options})


class Listener(Progress):
    def __init__(self) -> None:
        self.said: list[str] = []
        self.requests = 0

    def begin(self, name: str, requests: int) -> None:
        self.said.append(f"{name}: {requests}")

    def ended(self, record: Record) -> None:
        self.requests += 1

    def note(self, text: str) -> None:
        self.said.append(text)


async def test_warm_up_is_not_counted() -> None:
    """It has the load's lengths and none of its tokens."""
    target, listener = Reciter(), Listener()
    bench = Bench(target, plan(), listener)
    await bench.prepare()
    warm = dict(target.asked)
    assert len(warm) == 3 and {len(prompt) for prompt in warm.values()} <= {20, 9}
    measured = await bench.measure()
    assert len(measured.records) == 20 and measured.figures is not None and measured.figures.requests == 20
    assert not {tuple(prompt) for prompt in warm.values()} & {tuple(prompt) for prompt in target.asked.values()}
    assert listener.said == ["warm-up: 3", "rate 400: 20"] and listener.requests == 23


@pytest.mark.parametrize(("load", "crowd"), [({"streams": 2}, 2), ({"rate": 400.0}, 4)])
async def test_a_warm_up_is_no_heavier_than_its_load(load: dict[str, Any], crowd: int) -> None:
    """Whoever is measured beside it would wait behind a crowd that the load never makes."""
    target = Holding(crowd, last=8)
    await Bench(target, plan(Load(requests=8, mix=((1.0, 20, 1),), **load), warmup=8)).prepare()
    assert target.most == crowd


async def test_a_target_that_fails_its_warm_up_is_not_measured() -> None:
    bench = Bench(Reciter(refused=20), plan(Load(requests=5, rate=1.0, mix=((1.0, 20, 1),))))
    with pytest.raises(PdserveError, match="3 of 3 warm-up requests failed, the first with RESOURCE_EXHAUSTED"):
        await bench.prepare()


async def test_a_target_may_refuse_a_part_of_its_warm_up() -> None:
    """Who keeps its targets by refusing is in a state to be measured."""
    mix, listener = ((0.5, 20, 1), (0.5, 9, 1)), Listener()
    bench = Bench(Reciter(refused=20), plan(Load(requests=20, rate=400.0, mix=mix), warmup=20), listener)
    await bench.prepare()
    (note,) = [said for said in listener.said if "warm-up requests failed" in said]
    assert "of 20 warm-up requests failed, the first with RESOURCE_EXHAUSTED" in note
    assert not note.startswith(("0 ", "20 "))


async def test_the_vocabulary_must_be_known() -> None:
    silent = Facts("tiny")
    with pytest.raises(ConfigError, match="--vocab"):
        await Bench(Reciter(facts=silent), plan()).prepare()
    target = Reciter(facts=silent)
    await Bench(target, plan(vocab=80)).prepare()
    assert all(10 <= token < 60 for prompt in target.asked.values() for token in prompt)


async def test_what_is_too_long_is_told_or_left_out() -> None:
    facts, listener = Facts("tiny", max_model_len=12, vocab_size=500), Listener()
    with pytest.raises(ConfigError, match="of 20 requests need more than 12 tokens"):
        await Bench(Reciter(facts=facts), plan()).prepare()
    bench = Bench(Reciter(facts=facts), plan(drop_long=True), listener)
    await bench.prepare()
    measured = await bench.measure()
    assert {record.arrival.prompt for record in measured.records} == {9}
    assert sum("are left out" in said for said in listener.said) == 1
    hopeless = Facts("tiny", max_model_len=5, vocab_size=500)
    with pytest.raises(ConfigError, match="20 of 20"):
        await Bench(Reciter(facts=hopeless), plan(drop_long=True)).prepare()


async def test_a_refused_run_has_no_figures() -> None:
    """Sends are always late by some microseconds, which is too much for a target of one."""
    bench = Bench(Reciter(), plan(targets=HARD))
    await bench.prepare()
    measured = await bench.measure()
    assert measured.figures is None and measured.refused is not None
    found = result("here", bench.facts, "", plan(targets=HARD), measured)
    assert "figures" not in found and found["refused"].startswith("the client was the bottleneck")
    assert found["client"]["lateness_p99_ms"] > 0


async def test_a_search_finds_what_the_target_bears() -> None:
    """Its runs have seeds of their own and each is kept; the best one is the result."""
    load, begun = Load(requests=10, rate=400.0, mix=((1.0, 4, 2),)), list[float]()

    class Rates(Listener):
        def begin(self, name: str, requests: int) -> None:
            begun.append(float(name.split()[-1]) if name.startswith("rate") else 0.0)

    bench = Bench(Limited(1000.0, lambda: begun[-1]), plan(load), Rates())
    await bench.prepare()
    told = list[Measured]()
    search = await bench.find_rate(0.9, 0.1, 10, told.append)
    assert [run.load.rate for run in search.runs] == [400.0, 800.0, 1600.0, 1200.0, 1000.0, 1100.0]
    assert [run.seed for run in search.runs] == [0, 1, 2, 3, 4, 5] and told == list(search.runs)
    best = search.best()
    assert best is not None and best.load.rate == 1000.0 and search.ended_early is None
    found = json.loads(json.dumps(result("here", bench.facts, "s", plan(load), best, search)))
    assert found["find_rate"]["highest_rate"] == 1000.0 and found["find_rate"]["exact"] is True
    assert [run["figures"]["attainment"] for run in found["find_rate"]["runs"]] == [1.0, 1.0, 0.5, 0.5, 1.0, 0.5]
    assert (found["load"]["rate"], found["load"]["seed"], found["figures"]["attainment"]) == (1000.0, 4, 1.0)
    assert all(len(row) == len(RUNS) for row in run_rows(search))


async def test_a_search_ends_with_the_second_refusal_in_a_row() -> None:
    bench = Bench(Reciter(), plan(targets=HARD))
    await bench.prepare()
    search = await bench.find_rate(0.9, 0.1, 10)
    assert [run.load.rate for run in search.runs] == [400.0, 400.0] and search.best() is None
    assert search.ended_early is not None and "bottleneck" in search.ended_early


async def test_the_result() -> None:
    """One object that JSON can hold, and rows for each request by the names that others read."""
    bench = Bench(Reciter(), plan())
    await bench.prepare()
    measured = await bench.measure()
    found = json.loads(json.dumps(result("here", bench.facts, "salt", plan(), measured), allow_nan=False))
    assert found["pdserve_bench"] == 1 and (found["target"], found["model"]) == ("here", "tiny")
    assert found["slo"] == {"ttft_ms": 60000.0, "itl_ms": 60000.0, "percentile": 99.0}
    assert (found["load"]["loop"], found["load"]["seed"], found["load"]["salt"]) == ("open", 0, "salt")
    assert found["figures"]["attainment"] == 1.0 and found["figures"]["itl_ms"]["count"] > 0
    row = json.loads(json.dumps(request_row(measured.records[3])))
    assert row["at"] == measured.records[3].at and row["error"] is None and row["session"] == 3
    assert (row["prompt_tokens"], row["output_tokens"]) in {(20, 3), (9, 1)}
    assert len(row["itl_ms"]) == row["output_tokens"] - 1 and row["ttft_ms"] <= row["e2e_ms"]
    assert measured.figures is not None
    assert all(len(cells) == len(LATENCIES) for cells in latency_rows(measured.figures))
    assert any(cells[1].startswith("100.0% of 20") for cells in figure_rows(measured.figures, EASY))
