"""What breaks, by the plan, and is mended."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.world import World


class Nemesis:
    def __init__(self, world: World, rng: random.Random) -> None:
        self._world, self._rng = world, rng

    async def run(self) -> None:
        await asyncio.sleep(0)
