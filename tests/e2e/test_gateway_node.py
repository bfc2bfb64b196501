"""OpenAI's client from npm against a live gateway: answers, streams, refusals, retries, and an error in mid-stream."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pdserve.launch import ModelPart
from pdserve.testing import Cluster
from tests.integration.suites import serve
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("openai_client.mjs")
PATIENCE = 120.0


async def install(folder: Path) -> None:
    """npm's newest openai package; skips, with the reason, where node, npm or the registry cannot be had."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool} here")
    (folder / "package.json").write_text('{"type": "module", "private": true}')
    command = ("npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "openai")
    npm = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        said, _ = await asyncio.wait_for(npm.communicate(), PATIENCE)
    except TimeoutError:
        npm.kill()
        await npm.wait()
        pytest.skip(f"npm install took longer than {PATIENCE:.0f} s")
    if npm.returncode:
        pytest.skip(f"npm install openai failed: {said.decode()[-500:]}")


async def run(folder: Path, cluster: Cluster) -> dict[str, Any]:
    """What the script told, by step. Kills the router where the script waits for that."""
    (folder / SCRIPT.name).write_text(SCRIPT.read_text())
    node = await asyncio.create_subprocess_exec(
        *("node", SCRIPT.name, f"{cluster.http}/v1"),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert node.stdout is not None and node.stderr is not None
    steps: dict[str, Any] = {}
    try:
        async with asyncio.timeout(PATIENCE):
            async for line in node.stdout:
                step = json.loads(line)
                steps[step.pop("step")] = step
                if "streaming" in steps and cluster.suite.router is not None:
                    cluster.suite.router.kill()
            errors = (await node.stderr.read()).decode()
            assert await node.wait() == 0, errors
    finally:
        if node.returncode is None:
            node.kill()
            await node.wait()
    return steps


async def test_the_client_from_npm(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    folder.mkdir()
    await install(folder)
    part = ModelPart(make_tiny_model(tmp_path / "tiny"), "tiny", prefill=1, decode=2)
    async with serve(tmp_path / "logs", part, prefix_caches=1, gateways=1) as cluster:
        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
        chat = await cluster.client.complete([{"role": "user", "content": "hello"}], **options)
        texts = [(await cluster.client.complete(prompt, **options)).text for prompt in ("one", "two")]
        steps = await run(folder, cluster)
        assert steps["whole"] == {"text": chat.text, "tokens": 8}
        assert steps["streamed"] == {"text": chat.text, "roles": ["assistant"], "tokens": 8}
        assert steps["completions"] == {"texts": texts, "logprobs": 8}
        refused = {"status": 400, "param": "top_p", "type": "invalid_request_error", "kind": "BadRequestError"}
        assert steps["refused"] == refused
        assert steps["broken"] == {"code": "unavailable", "type": "server_error"}
        # Two retries, each after the second that Retry-After says.
        assert (steps["retried"]["status"], steps["retried"]["requests"]) == (503, 3)
        assert steps["retried"]["seconds"] >= 2
        await cluster.assert_all_free()
