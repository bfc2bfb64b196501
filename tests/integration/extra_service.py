"""Services beside a suite, for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pdserve.launch import Service


@asynccontextmanager
async def service(module: str, *flags: str, logs: Path, ready: bool = True) -> AsyncIterator[Service]:
    """One more service, which is killed in the end."""
    one = await Service.start(module, f"extra-{module}", flags, log_folder=logs, listener=lambda event: None)
    try:
        await (one.ready() if ready else one.bound())
        yield one
    finally:
        one.kill()
        await one.close()
