"""From a model's name to its folder, in a child process, so that neither torch nor a download lives in this one."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

from pdserve.core.errors import ModelError
from pdserve.core.layout import DTYPE_BYTES
from pdserve.launch.plan import ModelPart

DEMO_MODEL = "smollm2-135m-instruct"


async def resolve_model(
    name: str, *, revision: str | None = None, progress: Callable[[str], None] | None = None
) -> Path:
    """The folder of a local model, of the demo model, or of a hub id; fetched first if need be.

    `progress` gets one line for each stage of fetching. A local folder is returned without starting anything. Raises
    ModelError.
    """
    if folder := local_folder(name):
        return folder
    command = [sys.executable, "-m", "pdserve.launch.fetch_child", name, *([revision] if revision else [])]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
    fetched, failure = "", ""
    try:
        async for line in process.stdout:
            message = json.loads(line)
            if progress and "progress" in message:
                progress(message["progress"])
            fetched, failure = message.get("folder", fetched), message.get("error", failure)
        await process.wait()
        tail = (await errors).decode(errors="replace").strip().splitlines()
    finally:
        errors.cancel()
        if process.returncode is None:
            process.kill()
            await process.wait()
    if not fetched:
        raise ModelError(failure or (tail[-1] if tail else f"fetching {name!r} ended with code {process.returncode}"))
    return Path(fetched)


def local_folder(name: str) -> Path | None:
    """`name` as an absolute path where it is a folder on this machine."""
    path = Path(name).expanduser()
    return path.resolve() if path.is_dir() else None


def model_part(folder: Path, name: str, prefill: int = 0, decode: int = 0, colocated: int = 0) -> ModelPart:
    """A plan's part, with the sizes that the folder's files tell. What they don't tell is 0."""
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        dtype = config.get("torch_dtype") or config.get("dtype") or "float32"
        token_bytes = 2 * config["num_hidden_layers"] * heads * head_size * DTYPE_BYTES.get(dtype, 4)
        longest = int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError):  # the worker says what is wrong with a folder, and better
        token_bytes = longest = 0
    return ModelPart(folder, name, prefill, decode, colocated, weights, token_bytes, longest)
