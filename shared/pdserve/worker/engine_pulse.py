"""Does the engine still answer? A process that lives may be stuck: in a driver, in a kernel, stopped by somebody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from pdserve.worker.messages import Ping

BEAT = 1.0  # seconds between two looks


class EnginePulse:
    """Asks, and tells when no answer came for `limit` seconds, and when one does again. On one event loop."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._answer = asyncio.Event()

    def felt(self) -> None:
        """The engine has answered."""
        self._answer.set()

    async def watch(self, ask: Callable[[Ping], None], tell: Callable[[str], Awaitable[None]]) -> None:
        """For ever. `tell` gets the reason for a stall, and an empty one once it is over."""
        while True:
            self._answer.clear()
            ask(Ping())
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limit):
                    await self._answer.wait()
            if not self._answer.is_set():
                await tell(f"the engine has not answered for {self._limit:g} s")
                await self._answer.wait()
                await tell("")
            await asyncio.sleep(min(BEAT, self._limit))
