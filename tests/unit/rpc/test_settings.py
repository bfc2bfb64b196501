"""Settings come from the right place, mistakes are errors that name what is meant, and all of them are told at once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import Field, SecretStr

from pdserve.router.config import RouterSettings
from pdserve.rpc.settings import ServiceSettings
from pdserve.worker.config import WorkerSettings


class ExampleSettings(ServiceSettings):
    name: str = Field(description="required")
    worker: list[str] = Field(default_factory=list)
    caching: bool = True
    warm: bool = False
    secret: SecretStr | None = None

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.warm and not self.caching:
            yield "warm needs caching"


def refused(
    capsys: pytest.CaptureFixture[str], *argv: str, model: type[ServiceSettings] = ExampleSettings
) -> list[str]:
    """The lines that `argv` is refused with."""
    with pytest.raises(SystemExit) as caught:
        model.load(argv)
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("error: ") for line in lines)
    return [line.removeprefix("error: ") for line in lines]


def report(capsys: pytest.CaptureFixture[str], kind: str, *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        ExampleSettings.load([*argv, "--check-config", kind])
    assert caught.value.code == 0
    return capsys.readouterr().out


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


def test_an_object_that_is_made_directly_takes_nothing_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_PORT", "2")
    assert ExampleSettings(name="x").port == 0


def test_options_repeat_and_flags_negate() -> None:
    settings = ExampleSettings.load(["--name", "x", "--worker", "a:1", "--worker", "b:2", "--no-caching"])
    assert settings.worker == ["a:1", "b:2"] and settings.caching is False


@pytest.mark.parametrize("text", ["a:1,b:2", " a:1 , b:2 ", '["a:1", "b:2"]'])
def test_a_list_in_a_variable_has_commas_or_is_json(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PDSERVE_WORKER", text)
    assert ExampleSettings.load(["--name", "x"]).worker == ["a:1", "b:2"]


def test_one_value_in_a_file_is_a_list_of_one(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("name: x\nworker: a:1\n")
    assert ExampleSettings.load(["--config", str(tmp_path / "s.yaml")]).worker == ["a:1"]


def test_unknown_options_name_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt option that is required is one mistake, not two."""
    assert refused(capsys, "--nmae", "x") == ["--nmae: no such setting; --name is meant?"]
    assert refused(capsys, "--name", "x", "--log_level=info") == ["--log_level: no such setting; --log-level is meant?"]
    assert refused(capsys, "--name", "x", "--zzz") == ["--zzz: no such setting"]
    assert refused(capsys, "--name", "x", "--dra", "3") == ["--dra: no such setting"]  # abbreviations are not taken
    assert refused(capsys, "--name", "x", "stray") == ["unrecognized arguments: stray"]
    assert refused(capsys) == ["name is required: set it with --name, PDSERVE_NAME or in a file"]


def test_one_value_cannot_be_said_twice(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "--name", "x", "--port", "1", "--port=2") == ["--port: port was said already"]
    assert refused(capsys, "--name", "x", "--warm", "--no-warm") == ["--no-warm: warm was said already"]


def test_what_vllm_has_and_this_has_not_is_said_why(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = refused(capsys, "--name", "x", "--enforce-eager")
    assert line == "--enforce-eager: no such setting: nothing is captured or compiled, so eager is all there is"
    (line,) = refused(capsys, "--name", "x", "--kv-transfer-config", "{}")
    assert line.startswith("--kv-transfer-config: no such setting: the router pairs workers by itself"), (
        "no other is meant"
    )


def test_unknown_keys_name_their_line_and_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("name: x\n\nprot: 3\nconfig: other.yaml\n")
    assert refused(capsys, "--config", str(file)) == [
        "s.yaml:3: prot: no such setting; port is meant?",
        "s.yaml:4: config: no such setting",
    ]
    file.write_text("name: x\nlog_level: info\nlog-level: error\n")
    assert refused(capsys, "--config", str(file)) == ["s.yaml:3: log-level was said in line 2 already"]
    for content in ("- just\n- a list\n", "name: [\n", "\x00"):
        file.write_text(content)
        assert any(str(file) in line for line in refused(capsys, "--config", str(file), "--name", "x"))
    assert "missing.yaml" in refused(capsys, "--name", "x", "--config", str(tmp_path / "missing.yaml"))[0]


def test_unknown_variables_are_errors_and_another_services_are_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDSERVE_DRAIN_SECOND", "3")
    monkeypatch.setenv("PDSERVE_ZZZZ", "3")
    monkeypatch.setenv("PDSERVE_MAX_NUM_SEQS", "3")  # a worker's
    monkeypatch.setenv("PDSERVE_CACHE", "/somewhere")
    monkeypatch.setenv("PDSERVE_TEST_ANYTHING", "1")
    assert refused(capsys, "--name", "x") == [
        "environment variable PDSERVE_DRAIN_SECOND: no such setting; PDSERVE_DRAIN_SECONDS is meant?",
        "environment variable PDSERVE_ZZZZ: no such setting",
    ]


def test_what_kubernetes_sets_is_told_from_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Service named pdserve-router brings variables of its own; one named pdserve brings PDSERVE_PORT."""
    for name in ("ROUTER_SERVICE_HOST", "ROUTER_SERVICE_PORT_GRPC", "ROUTER_PORT_50051_TCP_ADDR"):
        monkeypatch.setenv(f"PDSERVE_{name}", "10.0.0.1")
    monkeypatch.setenv("PDSERVE_ROUTER_PORT", "tcp://10.0.0.1:50051")
    assert ExampleSettings.load(["--name", "x"]).port == 0
    monkeypatch.setenv("PDSERVE_PORT", "tcp://10.0.0.1:50051")
    (line,) = refused(capsys, "--name", "x")
    assert "enableServiceLinks" in line


def test_everything_wrong_is_told_at_once_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.yaml").write_text("log-level: loud\nnaem: x\n")
    monkeypatch.setenv("PDSERVE_DRAIN_SECONDS", "-1")
    lines = refused(capsys, "--config", str(tmp_path / "s.yaml"), "--port", "many", "--hots", "a")
    assert [line.split(":")[0] for line in lines] == ["--hots", "s.yaml", "port", "log-level", "drain-seconds"]
    places = ["--port", "s.yaml:1", "PDSERVE_DRAIN_SECONDS"]
    assert [line.rpartition("(")[2] for line in lines[2:]] == [f"{place})" for place in places]


def test_contradictions_are_all_told(capsys: pytest.CaptureFixture[str]) -> None:
    lines = refused(capsys, "--name", "x", "--warm", "--no-caching", "--advertise-host", "0.0.0.0")
    assert lines == ["advertise-host '0.0.0.0' is no address that others can connect to", "warm needs caching"]


def test_the_report_says_what_is_in_force_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.yaml").write_text("name: x\nsecret: hush\n")
    monkeypatch.setenv("PDSERVE_OTLP_ENDPOINT", "http://user:hush@host:4317")
    argv = ["--config", str(tmp_path / "s.yaml"), "--port", "3"]
    said = {name: (facts["value"], facts["at"]) for name, facts in json.loads(report(capsys, "json", *argv)).items()}
    assert said["port"] == (3, "--port") and said["name"] == ("x", "s.yaml:1")
    assert said["host"] == ("127.0.0.1", "default") and said["secret"] == ("********", "s.yaml:2")
    assert said["otlp-endpoint"] == ("http://********@host:4317", "PDSERVE_OTLP_ENDPOINT")
    table = report(capsys, "table", *argv)
    assert "hush" not in table and "s.yaml:1" in table
    schema = json.loads(report(capsys, "schema"))  # needs no valid settings
    assert {"name", "log-level"} <= schema["properties"].keys() and "launcher-fd" not in schema["properties"]


def test_worker_settings_take_sizes_and_cores() -> None:
    settings = WorkerSettings.load(
        ["--model", "/m/tiny", "--kv-cache-memory", "1GiB", "--cores", "0", "--device", "cpu"]
    )
    engine = settings.for_engine("decode")
    assert engine.kv_cache_bytes == 1 << 30 and engine.cores == (0,) and engine.threads == 1
    assert settings.model_name == "tiny" and 0 < engine.memory_share < 0.3 and engine.max_num_batched_tokens == 512


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--tensor-parallel-size", "2"], "tensor-parallel-size: 2 is not supported"),
        (["--cores", "0,x"], "core numbers"),
        (["--cores", "99999"], "not among those"),
        (["--device", "tpu"], "device"),
        (["--kv-cache-memory", "lots"], "'lots' is not a size"),
        (["--prefix-cache", "nowhere"], "must be host:port"),
        (["--ring-bytes", "1KiB"], "two frames at least, and frame-bytes is"),
        (
            ["--frame-bytes", "1KiB", "--frame-target-bytes", "2KiB"],
            "frame-target-bytes 2048 is above frame-bytes 1024",
        ),
        (["--kv-cache-memory", "1GiB", "--gpu-memory-utilization", "0.5"], "leave one out"),
        (["--prefix-cache", "h:1", "--no-enable-prefix-caching"], "never asked with no-enable-prefix-caching"),
        (["--cores", "0", "--threads", "2"], "threads 2 would fight over cores 0"),
        (["--device", "cpu", "--kv-transport", "nccl"], "kv-transport nccl moves KV between GPUs, and device is cpu"),
        (["--device", "cpu", "--attention-backend", "flash"], "block-size is 16"),
        (["--model", ".", "--revision", "v1"], "revision v1 is for hub ids, and model . is a folder"),
    ],
)
def test_worker_settings_that_cannot_be(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    model = [] if "--model" in argv else ["--model", "m"]
    assert words in "\n".join(refused(capsys, *model, *argv, model=WorkerSettings))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--worker", "h"], "worker: 'h' must be host:port"),
        (["--worker", "h:1", "--worker", "h:1"], "worker h:1 is given 2 times"),
        (["--model", "a=x", "--model", "a=y"], "model a is given 2 times"),
        (["--port", "7000", "--metrics-port", "7000"], "port and metrics-port are both 7000"),
        (["--otlp-endpoint", "collector"], "otlp-endpoint: 'collector' must be host:port"),
        (["--otlp-endpoint", "ftp://collector:1"], "http://host:port"),
    ],
)
def test_router_settings_that_cannot_be(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    assert words in "\n".join(refused(capsys, *argv, model=RouterSettings))


def test_what_make_sets_for_tests_stops_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services are started in its environment."""
    makefile = Path(__file__).parents[3] / "Makefile"
    names = re.findall(r"\b(PDSERVE_\w+)=", makefile.read_text())
    assert names
    for name in names:
        monkeypatch.setenv(name, "1")
    RouterSettings.load([])
