"""How hard the client itself had it. A client that cannot keep up measures itself, so such a run has no figures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pdserve.core.quantiles import Quantiles, quantiles_of
from pdserve.core.slo import SloTargets

MOST_LATENESS = 0.05  # of the TTFT target: what p99 of the sends may be late
MOST_LAG = 0.25  # of the ITL target: what p99 of the event loop's lag may be, for gaps are seen with that error
MOST_CPU = 0.9  # of one core: an event loop has no more
SHORT = 1.0  # seconds of a run that say nothing of its CPU share yet
_BEAT = 0.01  # seconds between two looks at the event loop


@dataclass(frozen=True, slots=True)
class Strain:
    """`lateness` of the sends and `lag` of the event loop in seconds; `cpu`, the client's share of one core over the
    `seconds` of the run."""

    lateness: Quantiles
    lag: Quantiles
    cpu: float
    seconds: float

    def as_dict(self) -> dict[str, float]:
        return {
            "lateness_p99_ms": 1e3 * self.lateness.p99,
            "lateness_max_ms": 1e3 * self.lateness.greatest,
            "lag_p99_ms": 1e3 * self.lag.p99,
            "lag_max_ms": 1e3 * self.lag.greatest,
            "cpu_share": self.cpu,
        }


def refusal(strain: Strain, targets: SloTargets) -> str | None:
    """Why the figures of a run would be the client's own; None where they are the target's."""
    late, lag = 1e3 * strain.lateness.p99, 1e3 * strain.lag.p99
    ttft, itl = 1e3 * targets.ttft, 1e3 * targets.itl
    reasons = []
    if late > MOST_LATENESS * ttft:
        reasons.append(f"p99 of the sends was {late:.1f} ms late, more than {MOST_LATENESS:.0%} of {ttft:g} ms TTFT")
    if lag > MOST_LAG * itl:
        reasons.append(f"p99 of its event loop's lag was {lag:.1f} ms, more than {MOST_LAG:.0%} of {itl:g} ms ITL")
    if strain.cpu > MOST_CPU and strain.seconds >= SHORT:
        reasons.append(f"it used {strain.cpu:.0%} of a core, more than {MOST_CPU:.0%}")
    return f"the client was the bottleneck: {'; '.join(reasons)}" if reasons else None


@dataclass(slots=True)
class Pulse:
    """What `watch` sees of this process while it is entered."""

    lags: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def strain(self, lateness: Sequence[float]) -> Strain:
        """After the watch; `lateness` of each send, in seconds."""
        cpu = self.cpu_seconds / self.seconds if self.seconds else 0.0
        return Strain(quantiles_of(lateness), quantiles_of(self.lags), cpu, self.seconds)


@asynccontextmanager
async def watch() -> AsyncIterator[Pulse]:
    """Watch this process's event loop and CPU time."""
    pulse, began, used = Pulse(), time.perf_counter(), time.process_time()
    task = asyncio.create_task(_beat(pulse.lags), name="pulse")
    try:
        yield pulse
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        pulse.seconds, pulse.cpu_seconds = time.perf_counter() - began, time.process_time() - used


async def _beat(lags: list[float]) -> None:
    while True:
        due = time.perf_counter() + _BEAT
        await asyncio.sleep(_BEAT)
        lags.append(max(0.0, time.perf_counter() - due))
