"""`pdserve probe speed` against a live suite, and `pdserve simulate` by what it printed."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from pdserve.launch import ModelPart
from tests.integration.suites import serve
from tests.tiny_models import make_tiny_model

PATIENCE = 240.0
REQUESTS = 24


async def command(*arguments: str) -> tuple[int | None, str, str]:
    """Exit status, stdout and stderr of the command line."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdserve.cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE)
    return process.returncode, out.decode(), err.decode()


@pytest.mark.timeout(600)
async def test_a_suite_is_measured_and_then_simulated(tmp_path: Path) -> None:
    """Workers that nobody asked for anything know what their own steps told them; requests add to that, and it
    simulates."""
    model = make_tiny_model(tmp_path / "tiny", "llama")
    async with serve(tmp_path / "logs", ModelPart(model, "tiny", prefill=1, decode=1)) as suite:
        target = ("--target", suite.endpoint, "--internal-secret-file", str(suite.suite.internal_secret_file))
        status, out, err = await command("probe", "speed", *target)
        assert status == 0, err
        assert "steps with prompts, 0 with answers" in out
        status, out, err = await command("probe", "speed", *target, "--requests", str(REQUESTS), "--json")
        assert status == 0, err
        prefill, decode = map(json.loads, out.splitlines())
        assert (prefill["role"], decode["role"], prefill["model"]) == ("prefill", "decode", "tiny")
        assert prefill["speed"]["prompts"] >= REQUESTS and decode["speed"]["answers"] >= REQUESTS
        status, table, _ = await command("probe", "speed", *target)
        assert status == 0 and prefill["worker_id"] in table
    (tmp_path / "speeds.jsonl").write_text(out)
    plan = ("--prefill", "1", "--decode", "2", "--prompt-tokens", "100", "--output-tokens", "10", "--rate", "1")
    measured = ("--measured", str(tmp_path / "speeds.jsonl"), "--requests", "20", "--json")
    status, out, err = await command("simulate", *plan, *measured)
    assert status == 0, err
    report, speed = json.loads(out), decode["speed"]
    assert report["requests"] == 20
    alone = speed["step"] + speed["answer"] + 100 * speed["read"]
    assert report["itl"]["p50"] == pytest.approx(alone, rel=0.5) and report["ttft"]["p50"] > 0
