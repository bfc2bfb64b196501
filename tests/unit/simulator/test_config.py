"""`pdserve simulate` reads a plan, refuses what makes no sense, and says what users would see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdserve.cli.app import app
from pdserve.core.errors import ConfigError
from pdserve.core.slo import SloTargets
from pdserve.simulator.config import SimulationSettings
from pdserve.simulator.costs import MOONCAKE, Fitted, Hardware, ModelShape, Roofline, Table
from pdserve.simulator.flags import parse_changes
from pdserve.simulator.plan import Fetch, Reject

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
        ("fleet.prefil=3", "fleet.prefil: no such key; did you mean fleet.prefill?"),
        ("flet.prefill=3", "flet: no such key; did you mean fleet?"),
        ("fleet.quux=3", "fleet.quux: no such key\n"),
        ("cost.devces=2", "cost.devces: no such key; did you mean cost.devices?"),
        ("workload.synthetic.rat=2", "workload.synthetic.rat: no such key; did you mean workload.synthetic.rate?"),
        ("fleet.outages.0=1", "fleet.outages: must hold keys, not ["),
        ("fleet.outages=[{worker: decode-0, att: 3, seconds: -1}]", "fleet.outages.0.seconds: must be above 0, not -1"),
        ("fleet.outages=[{worker: decode-0, att: 3, seconds: -1}]", "fleet.outages.0.at: must be said"),
        ("fleet.prefill=-1", "fleet.prefill: must be 0 or more, not -1"),
        ("fleet.prefill=many", "fleet.prefill: must be a whole number, not 'many'"),
        ("fleet.whole_prompts=perhaps", "fleet.whole_prompts: must be true or false, not 'perhaps'"),
        ("fleet=3", "fleet: must hold keys, not 3"),
        ("fleet.colocated=2", "leave prefill and decode out"),
        ("fleet.link=fast", "fleet.link: 'fast' is not a bandwidth"),
        ("fleet.speeds={gpu: 2}", "no such workers"),
        ("workload.trace=x.jsonl", "workload: a workload is either a trace or synthetic"),
        ("workload.synthetic.rate=null", "workload.synthetic.rate: must be a number, not nothing"),
        ("policy=best", "policy: must be 'default'"),
        ("model=lama3-8b", "did you mean llama3-8b?"),
        ("model={layers: 2}", "model.kv_width: must be said"),
        (
            "cost=cheap",
            "cost: must be mooncake, or hold hardware, splitwise, distserve, measured or prefill and decode",
        ),
        ("cost={hardwar: h100}", "cost: must be mooncake, or hold"),
        ("cost.hardware=h10", "cost.hardware: 'h10' is none of"),
        ("cost={hardware: {flops: 1}}", "cost.hardware.memory: must be said"),
        ("cost={prefill: [1, 2], decode: [1, 2, 3]}", "cost.prefill: has too few values"),
        ("cost={prefill: [1, 2, 3], decode: [0, 0, 0]}", "cost: decode coefficients must be 0 or more, and not all"),
        ("cost={distserve: none.json}", "none.json has no profile of facebook/opt-13b"),
        ("slo.itl_percentile=101", "slo.itl_percentile: must be 100 or less, not 101"),
        ("admission=predicted", "admission: goes by what requests ask for; say slo.stated: true"),
        ("seed=1.5", "seed: must be a whole number, not 1.5"),
        ("seed", "'seed' is not KEY=VALUE"),
        ("a..b=1", "'a..b=1' is not KEY=VALUE"),
        ("seed=[", "seed: '[' is not YAML"),
    ],
)
def test_nonsense_is_refused(plan: Path, change: str, said: str) -> None:
    """With the key in the message as people write it, exit status 2, and nothing that only pydantic's users know."""
    result = CliRunner().invoke(app, ["simulate", str(plan), "--set", change])
    assert result.exit_code == 2
    assert said in result.stderr
    assert not any(word in result.stderr for word in ("Input should", "permitted", "Part", "by name", "validation"))


def test_kv_aware_global_fetches_from_anybody(plan: Path) -> None:
    """Unless the plan contradicts it; other baselines take nothing from elsewhere, and the default policy a pair's."""
    found = {
        name: SimulationSettings.load(plan, {"policy": name}).plan().fetch
        for name in ("default", "kv-aware-global", "kv-aware", "load-balance", "random")
    }
    assert list(found.values()) == [Fetch.PAIR, Fetch.FLEET, Fetch.NONE, Fetch.NONE, Fetch.NONE]
    assert SimulationSettings.load(plan, {"fleet.fetch": "fleet"}).plan().fetch is Fetch.FLEET
    with pytest.raises(ConfigError, match="kv-aware-global"):
        SimulationSettings.load(plan, {"policy": "kv-aware-global", "fleet.fetch": "pair"})


def test_stated_targets_reach_the_router(plan: Path) -> None:
    """What is not stated is only measured."""
    assert SimulationSettings.load(plan).plan().targets is None
    settings = SimulationSettings.load(plan, {"slo.stated": True, "admission": "predicted"})
    assert settings.plan().targets == settings.targets() == SloTargets(0.4, 0.04, 99.0)
    assert settings.plan().reject is Reject.PREDICTED


def test_several_workloads_side_by_side(plan: Path, tmp_path: Path) -> None:
    """Each with its tenant and priority, its own start, and nothing shared with the others."""
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}
    trace.write_text(json.dumps(row) + "\n")
    also = [{"trace": str(trace), "tenant": "batch", "priority": -1, "start": 2.5}] * 2
    arrivals = SimulationSettings.load(plan, {"also": also}).arrivals()
    batch = [arrival for arrival in arrivals if arrival.tenant == "batch"]
    rest = {block for arrival in arrivals if arrival.tenant == "" for block in arrival.block_ids}
    assert [(arrival.at, arrival.priority, arrival.prompt) for arrival in batch] == [(2.5, -1, 600)] * 2
    assert len(arrivals) == 202 and [a.at for a in arrivals] == sorted(a.at for a in arrivals)
    first, second = (set(arrival.block_ids) for arrival in batch)
    assert len(first) == len(second) == 2 and not first & second and not rest & (first | second)


def test_tenants_are_told_apart(plan: Path) -> None:
    """Where there are several, each has its own rows and figures; the one without a name is called so."""
    also = "also=[{tenant: loud, synthetic: {requests: 5, rate: 50, prompt: 900, output: 9}}]"
    arguments = ["simulate", str(plan), "--requests", "20", "--set", also]
    report = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert {name: tenant["requests"] for name, tenant in report["tenants"].items()} == {"": 20, "loud": 5}
    assert report["tenants"]["loud"]["ttft"]["p50"] > 0
    table = CliRunner().invoke(app, arguments).stdout
    assert "loud, first token" in table and "(no tenant), between tokens" in table
    assert json.loads(CliRunner().invoke(app, [*arguments[:4], "--json"]).stdout)["tenants"] == {}


def test_schema() -> None:
    """It knows the keys, and that there are no others."""
    result = CliRunner().invoke(app, ["simulate", "--schema"])
    schema = json.loads(result.stdout)
    assert result.exit_code == 0 and set(schema["required"]) == {"fleet", "workload"}
    fleet = schema["$defs"]["FleetPart"]
    assert fleet["additionalProperties"] is False and "KV memory" in fleet["properties"]["kv_tokens"]["description"]
    assert "llama3-8b" in json.dumps(schema["properties"]["model"])


SPEED = {"step": 0.01, "token": 1e-4, "square": 0, "answer": 1e-3, "read": 1e-7, "prompts": 9, "answers": 9}
COST_FILES = {
    "perf.csv": "model,hardware,tensor_parallel,prompt_size,batch_size,prompt_time,token_time\n"
    "m,h,2,128,1,30,20\nm,h,2,128,4,60,24\n",
    "fits.json": json.dumps(
        {
            "m": {
                "2": {
                    "prefill": [1, 2, 3],
                    "decoding_smallbs": [4, 5, 6],
                    "decoding_largebs": [7, 8, 9],
                    "decoding_large_small_bs_threshold": 95,
                }
            }
        }
    ),
    "speeds.jsonl": json.dumps({"role": "decode", "model": "m", "speed": SPEED}) + "\n",
}


@pytest.mark.parametrize(
    ("cost", "model"),
    [
        ("mooncake", MOONCAKE),
        ("{prefill: [1, 2, 3], decode: [4, 5, 6]}", Fitted((1, 2, 3), (4, 5, 6))),
        ("{distserve: fits.json, model: m, devices: 2}", Fitted((1, 2, 3), (4, 5, 6), (7, 8, 9), 95)),
        (
            "{splitwise: perf.csv, model: m, hardware: h, devices: 2}",
            Table(((128, 0.03), (512, 0.06)), ((1, 0.02), (4, 0.024))),
        ),
        (
            "{hardware: {flops: 1.0e+15, memory: 1.0e+12, overhead_ms: 3}, devices: 2}",
            Roofline(Hardware(2e15, 2e12, overhead=3e-3), ModelShape(8.0e9, 32, 4096, 1024)),
        ),
    ],
)
def test_costs(plan: Path, cost: str, model: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way to say a cost gives its model."""
    for name, text in COST_FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert SimulationSettings.load(plan, parse_changes([f"cost={cost}"])).cost_model() == model


def test_a_model_by_its_figures(plan: Path) -> None:
    """Its KV is what is moved: 2 x 2 layers x 96 wide x 4 bytes."""
    shape = {"parameters": 1e6, "layers": 2, "hidden": 64, "kv_width": 96, "bytes": 4}
    settings = SimulationSettings.load(plan, {"model": shape})
    assert settings.plan().layout.token_bytes == settings.shape().kv_token_bytes == 2 * 2 * 96 * 4


def test_a_trace_is_scaled_and_copied(plan: Path, tmp_path: Path) -> None:
    """Twice as fast, three copies side by side, the first two requests of each."""
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,10,2\n4,20,2\n8,30,2\n")
    load = f"workload={{trace: {trace}, rate: 2, copies: 3, limit: 2}}"
    arrivals = SimulationSettings.load(plan, parse_changes([load])).arrivals()
    assert [arrival.at for arrival in arrivals] == [0, 0, 0, 2, 2, 2]


@pytest.mark.parametrize(
    "arguments",
    [
        "--trace trace.csv --prefill 1 --decode 1 --model opt-13b --hardware a100 --rate 2 --ttft-ms 300 --itl-ms 9",
        "--prompt-tokens 100 --output-tokens 5 --rate 2 --requests 3 --colocated 2 --measured speeds.jsonl",
    ],
)
def test_flags_do_without_a_file(arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace, or lengths; a roofline, or speeds that were measured."""
    (tmp_path / "trace.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,10,2\n4,20,2\n8,30,2\n")
    (tmp_path / "speeds.jsonl").write_text(COST_FILES["speeds.jsonl"])
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["simulate", *arguments.split(), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["requests"] == 3


def test_flags_are_over_the_file_and_set_is_over_flags(plan: Path) -> None:
    """Said three times, the last one counts."""
    arguments = ["simulate", str(plan), "--requests", "7", "--set", "workload.synthetic.requests=5", "--json"]
    assert json.loads(CliRunner().invoke(app, arguments).stdout)["requests"] == 5
    assert json.loads(CliRunner().invoke(app, [*arguments[:4], "--json"]).stdout)["requests"] == 7


def test_answers_of_a_single_token_have_no_gaps() -> None:
    """Which is null in JSON, and no number in the table."""
    arguments = ["simulate", "--colocated", "1", "--prompt-tokens", "9", "--output-tokens", "1", "--rate", "1"]
    arguments += ["--requests", "2"]
    itl = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["itl"]
    assert itl == {"mean": None, "p50": None, "p90": None, "p99": None}
    table = CliRunner().invoke(app, arguments).stdout
    assert "| between tokens" in table and "nan" not in table


def test_nothing_to_simulate_is_said() -> None:
    """With the flags that would do; and what a flag alone lacks."""
    for flags in ([], ["--prefill", "1"]):
        result = CliRunner().invoke(app, ["simulate", *flags])
        assert result.exit_code == 2 and "give a file, or flags" in result.stderr
    result = CliRunner().invoke(app, ["simulate", "--colocated", "1", "--prompt-tokens", "9"])
    assert result.exit_code == 2
    assert "workload.synthetic.rate: must be said" in result.stderr
    assert "workload.synthetic.output: must be said" in result.stderr


def test_files_that_are_none(tmp_path: Path) -> None:
    """A missing file, one that is not YAML, and one without keys."""
    with pytest.raises(ConfigError, match="cannot read"):
        SimulationSettings.load(tmp_path / "none.yaml")
    for text, said in (("a: [", "not YAML"), ("- 1", "must hold keys")):
        path = tmp_path / "bad.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError, match=said):
            SimulationSettings.load(path)
