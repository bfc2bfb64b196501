"""`pdserve simulate` reads a plan, refuses what makes no sense, and says what users would see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdserve.cli.app import app
from pdserve.core.errors import ConfigError
from pdserve.simulator.config import SimulationSettings, parse_changes
from pdserve.simulator.costs import MOONCAKE, Fitted, Roofline

PLAN = """
model: llama3-8b
cost: {hardware: h100}
fleet: {prefill: 2, decode: 2, speeds: {prefill-1: 0.5}, outages: [{worker: decode-0, at: 5, seconds: 2}]}
workload:
  synthetic: {requests: 200, rate: 8, prompt: 900, prompt_cv: 1, output: 60, turns: 2, think: 1, system: 128}
slo: {ttft_ms: 400, itl_ms: 40}
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    return path


def test_json_and_table(plan: Path) -> None:
    """Both come from one report, and the same plan gives the same figures."""
    runner = CliRunner()
    first, second = (runner.invoke(app, ["simulate", str(plan), "--json"]) for _ in range(2))
    report, again = json.loads(first.stdout), json.loads(second.stdout)
    assert report.pop("simulation_seconds") > 0 and again.pop("simulation_seconds") > 0
    assert report == again
    assert (report["requests"], report["replays"] > 0) == (200, True)
    assert 0 < report["hit_rate"] < 1 and 0 < report["attainment"] <= 1
    table = runner.invoke(app, ["simulate", str(plan)])
    assert table.exit_code == 0
    assert f"{1e3 * report['ttft']['p99']:.1f} ms" in table.stdout


def test_values_are_replaced(plan: Path) -> None:
    """--set reaches into the file, and adds what it does not have."""
    settings = SimulationSettings.load(plan, parse_changes(["fleet.decode=5", "policy=random", "fleet.link=25Gbit/s"]))
    assert (settings.fleet.decode, settings.policy, settings.fleet.prefill) == (5, "random", 2)
    assert settings.plan().link_bytes_per_second == pytest.approx(25e9 / 8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("fleet.prefil=3", "fleet.prefil"),
        ("fleet.colocated=2", "leave prefill and decode out"),
        ("workload.trace=x.jsonl", "either a trace or synthetic"),
        ("fleet.link=fast", "not a bandwidth"),
        ("fleet.speeds={gpu: 2}", "no such workers"),
        ("policy=best", "policy"),
        ("seed", "KEY=VALUE"),
    ],
)
def test_nonsense_is_refused(plan: Path, change: str, said: str) -> None:
    """With the key in the message, and exit status 2."""
    result = CliRunner().invoke(app, ["simulate", str(plan), "--set", change])
    assert result.exit_code == 2
    assert said in result.stderr


def test_costs(plan: Path) -> None:
    """Each way to say a cost gives its model."""
    coefficients = "cost={prefill: [1, 2, 3], decode: [4, 5, 6]}"
    found = SimulationSettings.load(plan, parse_changes([coefficients])).cost_model()
    assert found == Fitted((1, 2, 3), (4, 5, 6))
    assert SimulationSettings.load(plan, parse_changes(["cost=mooncake"])).cost_model() is MOONCAKE
    assert isinstance(SimulationSettings.load(plan).cost_model(), Roofline)


def test_a_trace_is_scaled_and_copied(plan: Path, tmp_path: Path) -> None:
    """Twice as fast, three copies side by side, the first two requests of each."""
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,10,2\n4,20,2\n8,30,2\n")
    load = f"workload={{trace: {trace}, rate: 2, copies: 3, limit: 2}}"
    arrivals = SimulationSettings.load(plan, parse_changes([load])).arrivals()
    assert [arrival.at for arrival in arrivals] == [0, 0, 0, 2, 2, 2]


def test_files_that_are_none(tmp_path: Path) -> None:
    """A missing file, one that is not YAML, and one without keys."""
    with pytest.raises(ConfigError, match="cannot read"):
        SimulationSettings.load(tmp_path / "none.yaml")
    for text, said in (("a: [", "not YAML"), ("- 1", "must hold keys")):
        path = tmp_path / "bad.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError, match=said):
            SimulationSettings.load(path)
