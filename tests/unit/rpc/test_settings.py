"""Settings come from the right place, and mistakes are errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field

from pdserve.rpc.settings import ServiceSettings, near_misses
from pdserve.worker.config import WorkerSettings


class ExampleSettings(ServiceSettings):
    name: str = Field(description="required")
    worker: list[str] = Field(default_factory=list)
    caching: bool = True


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        ExampleSettings.load(argv)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_command_line_over_environment_over_file_over_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("name: file\nport: 1\nlog-level: error\nworker: [a, b]\n")
    monkeypatch.setenv("PDSERVE_NAME", "environment")
    monkeypatch.setenv("PDSERVE_PORT", "2")
    settings = ExampleSettings.load(["--config", str(file), "--port", "3"])
    assert (settings.port, settings.name, settings.log_level) == (3, "environment", "error")
    assert settings.worker == ["a", "b"] and settings.host == "127.0.0.1"


def test_the_file_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s.yaml").write_text("name: x\n")
    monkeypatch.setenv("PDSERVE_CONFIG", str(tmp_path / "s.yaml"))
    assert ExampleSettings.load([]).name == "x"


def test_options_repeat_and_flags_negate() -> None:
    settings = ExampleSettings.load(["--name", "x", "--worker", "a:1", "--worker", "b:2", "--no-caching"])
    assert settings.worker == ["a:1", "b:2"] and settings.caching is False


def test_unknown_options_and_keys_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--nme" in refused(capsys, "--nme", "x")
    assert "name is required" in refused(capsys)
    assert "port" in refused(capsys, "--name", "x", "--port", "many")
    file = tmp_path / "s.yaml"
    file.write_text("name: x\nnmae: y\n")
    assert "nmae: no such setting" in refused(capsys, "--config", str(file))
    file.write_text("- just\n- a list\n")
    assert "key: value" in refused(capsys, "--config", str(file))
    assert "missing.yaml" in refused(capsys, "--config", str(tmp_path / "missing.yaml"))


def test_a_misspelt_variable_is_an_error_and_another_services_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDSERVE_DRAIN_SECOND", "3")
    assert "PDSERVE_DRAIN_SECONDS is meant" in refused(capsys, "--name", "x")
    assert near_misses(["PDSERVE_MAX_QUEUE_TIME", "PDSERVE_NAME", "HOME"], ["name", "port"]) == []


def test_worker_settings_take_sizes_and_cores(capsys: pytest.CaptureFixture[str]) -> None:
    settings = WorkerSettings.load(
        ["--model", "/m/tiny", "--kv-cache-memory", "1GiB", "--cores", "0", "--device", "cpu"]
    )
    engine = settings.for_engine("decode")
    assert engine.kv_cache_bytes == 1 << 30 and engine.cores == (0,) and engine.threads == 1
    assert settings.model_name == "tiny" and 0 < engine.memory_share < 0.3 and engine.max_num_batched_tokens == 512
    for argv, word in (
        (["--tensor-parallel-size", "2"], "tensor-parallel-size 2 is not supported"),
        (["--cores", "0,x"], "core numbers"),
        (["--cores", "99999"], "not among those"),
        (["--device", "tpu"], "device"),
        (["--ring-bytes", "1KiB"], "two frames"),
    ):
        with pytest.raises(SystemExit):
            WorkerSettings.load(["--model", "m", *argv])
        assert word in capsys.readouterr().err
