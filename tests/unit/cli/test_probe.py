"""`pdserve probe kv`: from a model's config.json, or from numbers alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdserve.cli.app import app

runner = CliRunner()
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def probe(*arguments: str) -> dict[str, Any]:
    result = runner.invoke(app, ["probe", "kv", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.output)
    return report


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of which there is nothing but its config.json."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_model_and_its_numbers_come_to_the_same(folder: Path) -> None:
    """1.3 GB for 4,000 tokens."""
    by_model = probe("--model", str(folder), "--tokens", "4000")
    by_numbers = probe("--layers", "80", "--kv-width", "1024", "--bits", "16", "--tokens", "4000")
    assert (by_model.pop("bits_from"), by_numbers.pop("bits_from")) == ("model", "told")
    assert by_model == by_numbers
    assert by_model["token_bytes"] == 327_680 and by_model["prompt_bytes"] == pytest.approx(1.3e9, rel=0.01)


def test_the_known_examples() -> None:
    wide = probe("--layers", "80", "--kv-width", "8192", "--tokens", "16000", "--rate", "2")
    assert wide["token_bytes"] == pytest.approx(2.6e6, rel=0.01)
    assert wide["prompt_bytes"] == pytest.approx(42e9, rel=0.01)
    assert wide["needed_bytes_per_second"] == pytest.approx(84e9, rel=0.01)
    assert wide["narrow_saves"] == pytest.approx(0.5, abs=0.002)
    # 1.5 GB: 4,578 tokens of 320 KiB
    links = {
        link["name"]: link for link in probe("--layers", "80", "--kv-width", "1024", "--tokens", "4578")["bandwidths"]
    }
    assert links["900GB/s"]["prompt_seconds"] == pytest.approx(1.67e-3, rel=0.01)
    assert links["200Gbit/s"]["prompt_seconds"] == pytest.approx(60e-3, rel=0.01)


def test_other_bits_and_bandwidths(folder: Path) -> None:
    report = probe("--model", str(folder), "--bits", "8", "--bandwidth", "1GB/s", "--bandwidth", "8Gbps")
    assert report["token_bytes"] == 163_840 and report["narrow_saves"] < 0
    first, second = report["bandwidths"]
    assert first["prompt_seconds"] == second["prompt_seconds"] == pytest.approx(4000 * 163_840 / 1e9)


def test_words_for_people(folder: Path) -> None:
    result = runner.invoke(app, ["probe", "kv", "--model", str(folder), "--rate", "20"])
    assert result.exit_code == 0
    expected = ("328 kB", "1.31 GB", "50% less", "26.2 GB/s", "1.46 ms", "short by", "400Gbit/s carries this rate 1.91")
    for words in expected:
        assert words in result.output
    nothing = runner.invoke(app, ["probe", "kv", "--model", str(folder), "--rate", "0", "--bits", "8"])
    assert nothing.exit_code == 0 and "no less" in nothing.output and "that is nothing" in nothing.output
    slow = runner.invoke(app, ["probe", "kv", "--model", str(folder), "--rate", "1e6"])
    assert "900GB/s cannot carry this rate" in slow.output


def test_where_the_bits_are_from_is_said(folder: Path) -> None:
    """A model's own 16 bits are not what its workers keep where they run float32."""
    own = runner.invoke(app, ["probe", "kv", "--model", str(folder)]).output
    assert "16 bits a number, its own; --bits 32 where workers run float32" in own
    assumed = runner.invoke(app, ["probe", "kv", "--layers", "2", "--kv-width", "8"]).output
    assert "16 bits a number, assumed" in assumed
    told = runner.invoke(app, ["probe", "kv", "--model", str(folder), "--bits", "32"]).output
    assert "32 bits a number\n" in told


@pytest.mark.parametrize("offline", ["1", ""])
def test_a_hub_that_cannot_be_reached_is_one_line_at_once(offline: str) -> None:
    """In a process of its own: the hub's client reads its variables when it is imported. Port 1 refuses connections."""
    environment = {**os.environ, "HF_HUB_OFFLINE": offline, "HF_ENDPOINT": "http://127.0.0.1:1"}
    command = [sys.executable, "-m", "pdserve.cli", "probe", "kv", "--model", "nobody/has-this"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    [line] = [line for line in result.stderr.splitlines() if line.startswith("pdserve: ")]
    assert "cannot be reached" in line and "--layers" in line
    assert "Retrying" not in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--rate", "1e6"], 0),  # nobody asked for a certain network
        (["--rate", "1", "--bandwidth", "25Gbit/s"], 0),
        (["--rate", "20", "--bandwidth", "25Gbit/s"], 1),
        (["--rate", "20", "--bandwidth", "900GB/s", "--bandwidth", "25Gbit/s"], 1),
        (["--rate", "0", "--bandwidth", "1kB/s"], 0),
    ],
)
def test_the_status_says_whether_each_bandwidth_asked_for_carries_the_rate(
    folder: Path, arguments: list[str], status: int
) -> None:
    result = runner.invoke(app, ["probe", "kv", "--model", str(folder), *arguments])
    assert result.exit_code == status, result.output


def test_a_model_that_cannot_be_read_is_one_line_with_a_way_out(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["OtherForCausalLM"]}))
    result = runner.invoke(app, ["probe", "kv", "--model", str(folder)])
    assert result.exit_code == 1 and result.output.count("\n") == 1
    assert "OtherForCausalLM" in result.output and "--kv-width" in result.output
