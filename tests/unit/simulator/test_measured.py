"""Speeds of a real suite become a cost model, or an error that says what they lack."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from pdserve.core.errors import ConfigError
from pdserve.policy.estimate import Speed
from pdserve.simulator.costs import Measured
from pdserve.simulator.measured import read_measured

FAST = Speed(step=0.01, token=1e-4, square=2e-8, answer=1e-3, read=1e-7, prompts=100, answers=100)
SLOW = Speed(step=0.03, token=3e-4, square=6e-8, answer=3e-3, read=3e-7, prompts=100, answers=100)
COLD = Speed(step=9.0, token=9.0, prompts=1, answers=3)


def write(path: Path, *workers: tuple[str, str, Speed]) -> Path:
    """A file as `pdserve probe speed --json` prints it, with more than is read."""
    lines = [
        json.dumps({"worker_id": "w", "role": role, "model": model, "speed": dataclasses.asdict(speed)})
        for role, model, speed in workers
    ]
    path.write_text("\n".join(lines) + "\n\n")
    return path


def test_pools_take_the_mean_of_their_workers(tmp_path: Path) -> None:
    """Prompts from prefill workers that know them, answers from decode workers that do."""
    path = write(tmp_path / "s", ("prefill", "m", FAST), ("prefill", "m", SLOW), ("prefill", "m", COLD),
                 ("decode", "m", SLOW), ("decode", "m", COLD))  # fmt: skip
    found = read_measured(path)
    assert found.prefill.token == pytest.approx(2e-4) and found.prefill.step == pytest.approx(0.02)
    assert found.decode == SLOW


def test_workers_that_do_both_stand_in(tmp_path: Path) -> None:
    """Where no prefill worker knows, whoever does. A fleet has others, too, which compute nothing."""
    path = write(tmp_path / "s", ("decode", "m", FAST), ("prefill", "m", COLD), ("prefix-cache", "", COLD))
    assert read_measured(path) == Measured(FAST, FAST)


def test_one_model_of_several(tmp_path: Path) -> None:
    path = write(tmp_path / "s", ("decode", "a", FAST), ("decode", "b", SLOW))
    assert read_measured(path, "b") == Measured(SLOW, SLOW)
    with pytest.raises(ConfigError, match=r"say cost.model: a or b"):
        read_measured(path)
    with pytest.raises(ConfigError, match="no worker of c"):
        read_measured(path, "c")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no worker"),
        ("{", "line 1: not JSON"),
        ("[]", "line 1: it: "),
        ('{"role": "decode", "model": "m"}', "line 1: speed: field required"),
        ('{"role": "decode", "model": "m", "speed": {"step": -1}}', "line 1: speed.step"),
    ],
)
def test_what_is_no_such_file(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "s"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_measured(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_measured(tmp_path / "none")


def test_what_nobody_knows_is_said(tmp_path: Path) -> None:
    """A suite that served nothing has nothing to tell, nor has one that only answered."""
    with pytest.raises(ConfigError, match="what prompts take"):
        read_measured(write(tmp_path / "s", ("prefill", "m", COLD)))
    with pytest.raises(ConfigError, match="what answers take"):
        read_measured(write(tmp_path / "s", ("prefill", "m", dataclasses.replace(FAST, answers=0))))


def test_steps_take_what_was_learned() -> None:
    """Prompts alone, answers alone, and both with the constant of the prompts."""
    cost = Measured(FAST, SLOW)
    assert cost.step([(100, 50), (0, 10)], 0, 0) == pytest.approx(0.01 + 60e-4 + 2e-8 * (150**2 - 100**2 + 10**2))
    assert cost.step((), 4, 1000) == pytest.approx(SLOW.decode_seconds(4, 1000))
    assert cost.step([(0, 10)], 4, 1000) == pytest.approx(0.01 + 10e-4 + 2e-6 + 4 * 3e-3 + 3e-4)
    assert cost.step((), 0, 0) == 0
