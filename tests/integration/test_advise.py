"""`pdserve advise` about a live suite: by what its router remembers, and by what it counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.launch import ModelPart
from tests.integration.suites import serve
from tests.integration.test_probe_speed import REQUESTS, command
from tests.tiny_models import make_tiny_model

# Workers that take one at a time, and short loads: the simulations are no part of what is tested here.
QUICK = ("--set", "fleet.max_num_seqs=1", "--ttft-ms", "100", "--json")


@pytest.mark.timeout(600)
async def test_a_running_suite_is_judged(tmp_path: Path) -> None:
    """An idle one tells nothing; then its requests are read one by one, with its own speeds, or drawn."""
    model = make_tiny_model(tmp_path / "tiny", "llama")
    part = ModelPart(model, "tiny", prefill=1, decode=1)
    async with serve(tmp_path / "logs", part, metrics=True) as suite:
        target = ("--target", suite.endpoint)
        status, _, err = await command("advise", *target)
        assert status == 2 and "remembers 0 answered requests" in err
        secret = ("--internal-secret-file", str(suite.suite.internal_secret_file))
        status, _, err = await command("probe", "speed", *target, *secret, "--requests", str(REQUESTS))
        assert status == 0, err
        status, out, err = await command("advise", *target, *QUICK, "--itl-ms", "1000")
        assert status == 0, err
        told = json.loads(out)
        assert (told["load"]["requests"], told["load"]["output"]["p50"]) == (REQUESTS, 16)
        assert told["compared"] == "workers as fast as its own" and told["source"].startswith("tiny at ")
        assert told["compute"]["prefill_seconds"] > 0 and told["targets"]["ttft"] == 0.1
        status, _, err = await command("advise", *target, "--hardware", "h100")
        assert status == 2 and "--hardware needs --model here" in err
        drawn = ("--metrics", suite.metrics["router"], "--rate", "2", "--requests", "40", "--model", "llama3-70b")
        status, out, err = await command("advise", *drawn, "--devices", "4", "--hardware", "h100", *QUICK)
        assert status == 0, err
        told = json.loads(out)
        assert told["load"]["requests"] == 40 and 8 < told["load"]["output"]["p99"] <= 16
        assert f"from histograms of {REQUESTS} requests" in told["notes"][0]
