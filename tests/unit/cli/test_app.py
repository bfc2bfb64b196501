"""The command line without a fleet: what it refuses, and with which code."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdserve.cli.app import app
from pdserve.cli.console import parse_size
from pdserve.cli.serve_settings import ServeSettings, model_counts
from pdserve.core.errors import ConfigError
from pdserve.launch import WorkerOptions

runner = CliRunner()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--model", "m", "--colocated", "1", "--prefill", "1"], "leave --prefill and --decode out"),
        (["serve", "--model", "a", "--prefill", "1", "--prefill", "2"], "given 2 times for 1 models"),
        (["serve"], "--model"),
        (["serve", "--model", "m", "--kv-cache-memory", "lots"], "not a size"),
        (["serve", "--model", "m", "--prefil", "2"], "--prefill is meant?"),
        (["serve", "--model", "m", "--prefix-cache-capacity", "1GiB"], "prefix-cache is 0"),
        (["serve", "--model", "m", "--port", "8000"], "port 8000 is a gateway's too"),
        (["serve", "--model", ".", "--revision", "main"], "revision main is for hub ids"),
        (["serve", "--model", "m", "--decode", "-1"], "0 or more"),
        (["config", "check"], "--service"),
        (["config", "check", "pyproject.toml"], "which service is it for?"),
        (["config", "check", "none.yaml"], "none.yaml: there is no such file"),
        (["config", "check", "--service", "router", "none.yaml"], "none.yaml: there is no such file"),
        (["serve", "--config", "none.yaml"], "none.yaml: No such file or directory"),
        (["config", "check", "--service", "cook"], "none of router"),
        (["generate", "hi", "--logprobs", "1"], "--json"),
        (["generate", "hi", "--no-such-flag"], "--no-such-flag"),
        (["nothing"], "nothing"),
        (["probe", "kv"], "--model, or both --layers and --kv-width"),
        (["probe", "kv", "--layers", "80"], "--model, or both --layers and --kv-width"),
        (["probe", "kv", "--model", ".", "--layers", "80"], "one or the other"),
        (["probe", "kv", "--layers", "1", "--kv-width", "1", "--bandwidth", "fast"], "not a bandwidth"),
        (["probe", "links", "--bytes", "lots"], "not a size"),
        (["probe", "links", "--frame-bytes", "0"], "above 0"),
        (["probe", "speed", "--requests", "-1"], "--requests"),
        (["bench", "--rate", "1"], "say what to send"),
        (["bench", "--prompt-tokens", "8", "--output-tokens", "8"], "say how fast"),
        (["bench", "--prompt-tokens", "8", "--rate", "1"], "go together"),
        (["bench", "--mix", "80% 8/8", "--rate", "1"], "100%"),
        (["bench", "--mix", "100% 8/8", "--streams", "2", "--find-rate"], "--find-rate"),
        (["bench", "--mix", "100% 8/8", "--rate", "1", "--target", "here"], "host:port"),
        (["bench", "--mix", "100% 8/8", "--rate", "1", "--target", "http://"], "names no host"),
        (["bench", "--mix", "100% 8/8", "--rate", "1", "--itl-percentile", "0"], "--itl-percentile"),
        (["bench", "--mix", "100% 8/8", "--rate", "1", "--plot", "a.gif"], "FILE.png or FILE.html"),
        (["bench", "--mix", "100% 8/8", "--rate", "1", "--output", "nowhere/a.json"], "there is no folder"),
        (["bench", "--mix", "100% 8/8", "--rate", "1", "--find-rate", "--precision", "2"], "a precision in (0, 1)"),
        (["bench", "--trace", "none.jsonl", "--rate", "1"], "cannot read none.jsonl"),
    ],
)
def test_wrong_usage_is_code_2_and_names_the_culprit(arguments: list[str], words: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize("model", [["./nowhere"], ["--model", "./nowhere"]], ids=len)
def test_a_model_that_does_not_exist_is_one_line_and_code_1(model: list[str]) -> None:
    """`pdserve serve MODEL` is how vLLM's users say it."""
    result = runner.invoke(app, ["serve", *model, "--port", "0", "--http-port", "0"])
    assert result.exit_code == 1
    assert "nowhere" in result.output and "Traceback" not in result.output


def test_no_router_is_a_plain_line_and_code_1() -> None:
    """Port 1 on loopback refuses connections. `generate` tries again, twice, and says so."""
    for command, tries in ((["status"], 1), (["generate", "hi"], 3), (["probe", "links"], 1), (["probe", "speed"], 1)):
        result = runner.invoke(app, [*command, "--target", "127.0.0.1:1", "--connect-timeout", "0"])
        lines = result.output.splitlines()
        assert result.exit_code == 1 and len(lines) == tries, result.output
        assert all(line.startswith("pdserve: ") for line in lines)
        assert lines[-1].startswith("pdserve: nothing answers there") and "Traceback" not in result.output


def test_settings_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """PDSERVE_MODEL stands for --model, PDSERVE_DEVICE for --device."""
    monkeypatch.setenv("PDSERVE_MODEL", "./nowhere-else")
    assert "nowhere-else" in runner.invoke(app, ["serve", "--port", "0", "--http-port", "0"]).output
    monkeypatch.setenv("PDSERVE_PORT", "not a number")
    assert runner.invoke(app, ["serve"]).exit_code == 2


def test_settings_of_serve_come_from_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "suite.yaml").write_text("model: [a=x, b=y]\nprefill: [1, 2]\ndecode: 1\nkv-cache-memory: 1GiB\n")
    settings = ServeSettings.load(["--config", str(tmp_path / "suite.yaml"), "--decode", "3"])
    assert settings.counts == [(1, 3, 0), (2, 3, 0)] and settings.kv_cache_memory == 1 << 30


def test_a_cache_that_nobody_would_ask_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ServeSettings.load(["--model", "m", "--prefix-cache", "1", "--no-enable-prefix-caching"])
    assert "prefix-cache 1 is never asked with no-enable-prefix-caching" in capsys.readouterr().err


def test_serve_has_every_option_of_workers() -> None:
    assert {field.name for field in dataclasses.fields(WorkerOptions)} <= ServeSettings.model_fields.keys()


def test_config_check_asks_each_service_and_reports_all_files(tmp_path: Path) -> None:
    """Real processes: each service reads its file and the environment as it would at its start."""
    files = {
        "router.yaml": "worker: [h:1]\n",
        "decode-2.yaml": "model: m\n",
        "prefill_1.yaml": "model: m\nblock-sise: 3\n",
        "prefix-cache.yaml": "capacity: 1GiB\n",
        "serve.yaml": "model: m\ncolocated: 2\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    result = runner.invoke(app, ["config", "check", "--json", *(str(tmp_path / name) for name in files)])
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    assert [report["service"] for report in reports] == ["router", "decode", "prefill", "prefix-cache", "serve"]
    assert [report["valid"] for report in reports] == [True, True, False, True, True] and result.exit_code == 2
    assert reports[2]["problems"] == ["prefill_1.yaml:2: block-sise: no such setting; block-size is meant?"]
    assert reports[0]["settings"]["worker"] == {"value": ["h:1"], "source": "file", "at": "router.yaml:1"}


def test_config_check_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_MODEL", "m")
    result = runner.invoke(app, ["config", "check", "--service", "decode"])
    assert result.exit_code == 0 and "environment: valid settings for decode" in result.output
    assert re.search(r"model +m +PDSERVE_MODEL", result.output)
    schema = json.loads(runner.invoke(app, ["config", "schema", "--service", "decode"]).output)
    assert "kv-cache-memory" in schema["properties"]


def test_models_list_shows_both_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, hub = tmp_path / "own" / "tiny", tmp_path / "hub" / "models--owner--name" / "snapshots" / "abc"
    for folder in (own, hub):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"1234")
    monkeypatch.setenv("PDSERVE_CACHE", str(own.parent))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    lines = runner.invoke(app, ["models", "list", "--json"]).output.splitlines()
    assert [(entry["name"], entry["weight_bytes"]) for entry in map(json.loads, lines)] == [
        ("tiny", 4),
        ("owner/name", 4),
    ]


@pytest.mark.parametrize(
    ("models", "prefill", "decode", "colocated", "expected"),
    [
        (1, [], [], [], [(1, 1, 0)]),
        (1, [2], [3], [], [(2, 3, 0)]),
        (2, [1], [2], [], [(1, 2, 0), (1, 2, 0)]),
        (2, [1, 0], [1, 0], [0, 1], [(1, 1, 0), (0, 0, 1)]),
        (1, [], [], [2], [(0, 0, 2)]),
    ],
)
def test_counts_are_said_once_or_once_a_model(
    models: int, prefill: list[int], decode: list[int], colocated: list[int], expected: list[tuple[int, int, int]]
) -> None:
    assert model_counts(models, prefill, decode, colocated) == expected


def test_counts_that_fit_no_number_of_models_are_refused() -> None:
    with pytest.raises(ConfigError):
        model_counts(3, [1, 1], [], [])


@pytest.mark.parametrize(
    ("text", "size"), [("7", 7), ("1.5KiB", 1536), ("2GB", 2 * 10**9), ("4 gib", 4 << 30), ("3M", 3 * 10**6)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("target", ["localhost", "http://127.0.0.1:8000/v1", "127.0.0.1:0", ":50051"])
def test_a_target_is_host_and_port(target: str) -> None:
    """Anything else is refused before a connection is tried, with what it should be."""
    result = runner.invoke(app, ["status", "--target", target])
    assert result.exit_code == 2
    assert "must be host:port, such as 127.0.0.1:50051" in " ".join(result.stderr.replace("│", " ").split())
