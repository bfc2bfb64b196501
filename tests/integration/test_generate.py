"""`pdserve generate` as people type it, against a live suite: how long an answer is that nobody gave a length."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdserve.launch import ModelPart
from tests.integration.suites import serve
from tests.tiny_models import make_tiny_model

LONGEST = 320
PATIENCE = 120.0


async def generate(target: str, *arguments: str) -> tuple[list[dict[str, object]], str]:
    """The events that the command prints, and what it says to people."""
    command = [sys.executable, "-m", "pdserve.cli", "generate", *arguments, "--json", "--ignore-eos", "--seed", "1"]
    process = await asyncio.create_subprocess_exec(
        *command, "--target", target, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode == 0, err.decode()
    return [json.loads(line) for line in out.decode().splitlines()], err.decode()


def lengths(events: Sequence[dict[str, object]]) -> tuple[int, int]:
    """Tokens of prompt and answer."""
    usage = events[-1]["usage"]
    assert isinstance(usage, dict)
    return usage["prompt_tokens"], usage["completion_tokens"]


@pytest.mark.timeout(600)
async def test_an_answer_without_a_length_has_one(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", "llama")
    async with serve(tmp_path / "logs", ModelPart(model, "tiny", colocated=1), max_model_len=LONGEST) as suite:
        events, said = await generate(suite.endpoint, "hello")
        assert lengths(events)[1] == 256 and "stopped after 256 tokens" in said
        # Where so much does not fit, what does; nobody asked for 256.
        events, said = await generate(suite.endpoint, "hello " * 20)
        prompt, answer = lengths(events)
        assert prompt > LONGEST - 256 and answer == LONGEST - prompt and f"stopped after {answer} tokens" in said
        events, said = await generate(suite.endpoint, "hello", "--max-tokens", "0")
        assert sum(lengths(events)) == LONGEST and said == ""
        events, said = await generate(suite.endpoint, "hello", "--max-tokens", "3")
        assert lengths(events)[1] == 3 and said == ""
