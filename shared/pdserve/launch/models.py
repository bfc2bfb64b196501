"""From a model's name to its folder, in a child process, so that neither torch nor a download lives in this one."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

from pdserve.core.errors import ModelError

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


def weight_bytes(folder: Path) -> int:
    """Bytes of a model's weight files: about what one loaded copy takes."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
