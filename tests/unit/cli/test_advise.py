"""`pdserve advise` reads what it is given, names what contradicts itself, and answers in tables or as one object."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdserve.cli.advise_source import histograms
from pdserve.cli.app import app
from pdserve.core.errors import ConfigError

COST = "cost={prefill: [20, 0.05, 0], decode: [10, 0, 0.1]}"  # ms, as in DistServe's form
SMALL = "fleet.max_num_seqs=2"  # so that a little is much
FLAGS = ("--set", COST, "--set", SMALL, "--ttft-ms", "300", "--itl-ms", "30")


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    """24 short requests in 12 seconds, as a bench measured them."""
    path = tmp_path / "bench.json"
    rows = [{"at": index / 2, "prompt_tokens": 50 + index, "output_tokens": 10, "ttft_ms": 9} for index in range(24)]
    path.write_text(json.dumps({"pdserve_bench": 1, "requests": rows}, indent=1))
    return path


def test_a_bench_is_judged(bench: Path) -> None:
    """As tables that end with the answer, and as one object that says the same; twice the same."""
    runner = CliRunner()
    arguments = ["advise", str(bench), *FLAGS, "--gpu-hour-cost", "3.6"]
    first, second = (runner.invoke(app, [*arguments, "--json"]) for _ in range(2))
    assert first.exit_code == 0, first.output
    assert first.stdout == second.stdout
    told = json.loads(first.stdout)
    assert (told["pdserve_advice"], told["disaggregate"], told["why"], told["workers"]) == (1, False, "low_load", 2)
    assert told["load"]["rate"] == 2.0 and told["compute"]["ratio"] > 0
    side = told["colocated"]
    assert side["gpu_seconds_per_request"] == pytest.approx(2 / side["goodput"])
    assert side["cost_per_request"] == pytest.approx(side["gpu_seconds_per_request"] * 0.001)
    assert any("24 requests are few" in note for note in told["notes"])
    table = runner.invoke(app, arguments)
    assert table.exit_code == 0 and table.stdout.rstrip().endswith(told["sentence"] + ".")
    assert "2 co-located" in table.stdout and "1P1D" in table.stdout


def test_only_the_first_requests_are_taken(bench: Path) -> None:
    """And that is said."""
    result = CliRunner().invoke(app, ["advise", str(bench), *FLAGS, "--itl-ms", "1", "--requests", "10", "--json"])
    told = json.loads(result.stdout)
    assert (told["load"]["requests"], told["why"], told["colocated"]) == (10, "impossible", None)
    assert "only the first 10 of 24 requests: --requests for more" in told["notes"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["FILE", "--metrics", "http://127.0.0.1:1/metrics"], "FILE and --metrics are two things to judge"),
        (["FILE", "--target", "127.0.0.1:1"], "FILE and --target are two things to judge"),
        (["--target", "127.0.0.1:1", "--metrics", "http://x/metrics"], "--target and --metrics are two things"),
        (["--metrics", "http://x/metrics", "--rate", "3", "--watch", "5"], "--rate says what --watch would find out"),
        (["FILE", "--rate", "3"], "--rate is for requests that are drawn from --metrics"),
        (["FILE", "--served-model", "m"], "--served-model is for a running suite"),
        (["FILE", "--hardware", "h100", "--measured", "x.jsonl"], "give one or the other"),
        (["FILE", "--hardware", "h10"], "cost.hardware: 'h10' is none of"),
        (["FILE", "--set", "fleet.prefill=2"], "fleet.prefill: not for an advice"),
        (["--metrics", "127.0.0.1:9090"], "--metrics is a URL such as"),
        (["none.csv"], "cannot read none.csv"),
    ],
)
def test_contradictions_and_mistakes_are_named(arguments: list[str], said: str, bench: Path) -> None:
    """Before anything is simulated."""
    given = [str(bench) if argument == "FILE" else argument for argument in arguments]
    result = CliRunner().invoke(app, ["advise", *given])
    assert result.exit_code == 2 and said in result.stderr


METRICS = """# TYPE {prefix}request_prompt_tokens histogram
{prefix}request_prompt_tokens_bucket{{model_name="m",le="64.0"}} 10.0
{prefix}request_prompt_tokens_bucket{{model_name="m",le="128.0"}} 30.0
{prefix}request_prompt_tokens_bucket{{model_name="m",le="+Inf"}} 31.0
# TYPE {prefix}request_generation_tokens histogram
{prefix}request_generation_tokens_bucket{{model_name="m",le="16.0"}} 31.0
{prefix}request_generation_tokens_bucket{{model_name="m",le="+Inf"}} 31.0
"""


@pytest.mark.parametrize("prefix", ["pdserve_", "vllm:"])
def test_histograms_of_a_router_are_read(prefix: str) -> None:
    """Up to a bound becomes between two, whoever counts them."""
    prompts, outputs, name = histograms(METRICS.format(prefix=prefix), "u", None)
    assert (prompts.bounds, prompts.counts, name) == ((64.0, 128.0, math.inf), (10.0, 20.0, 1.0), "m")
    assert (outputs.counts, outputs.total) == ((31.0, 0.0), 31.0)


@pytest.mark.parametrize(
    ("text", "model", "said"),
    [
        ("up 1\n", None, "has no request_prompt_tokens"),
        ("<html>", None, "does not serve Prometheus metrics"),
        (METRICS.format(prefix="pdserve_"), "x", "--served-model x: u has answered for m"),
        (METRICS.format(prefix="pdserve_").replace("31.0", "3.0").replace("30.0", "2.0"), None, "fewer than 20"),
    ],
)
def test_metrics_that_tell_nothing_are_refused(text: str, model: str | None, said: str) -> None:
    """With what is missing."""
    with pytest.raises(ConfigError, match=said):
        histograms(text, "u", model)
