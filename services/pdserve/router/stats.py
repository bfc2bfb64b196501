"""What happened in the last minute, model by model: the figures of `pdserve top`."""

from __future__ import annotations

import time
from collections.abc import Callable

from pdserve.core.quantiles import Quantiles, Window
from pdserve.core.slo import Outcome, Verdict
from pdserve.router.meter import Ended, Meter
from pdserve.v1 import stats_pb2

WINDOW = 60.0  # seconds


class ModelWindow:
    """One model's last minute. Latencies are seconds; the other windows hold counts, one value for each request."""

    def __init__(self, now: float) -> None:
        self.running = 0
        self.ttft, self.itl, self.queue = Window(now, WINDOW), Window(now, WINDOW), Window(now, WINDOW)
        self.good, self.replays = Window(now, WINDOW), Window(now, WINDOW)
        self.prompt_tokens, self.cached_tokens = Window(now, WINDOW), Window(now, WINDOW)
        self.ends = {outcome: Window(now, WINDOW) for outcome in Outcome}

    def told(self, model: str, waiting: int, now: float) -> stats_pb2.ModelStats:
        """As stats.proto defines it; `waiting` is how many wait for a worker."""
        ttft, itl, queue = (window.merged(now) for window in (self.ttft, self.itl, self.queue))
        good, replays, prompt, cached = (
            window.merged(now).total for window in (self.good, self.replays, self.prompt_tokens, self.cached_tokens)
        )
        ends = {outcome: window.merged(now).count for outcome, window in self.ends.items()}
        seconds = self.ttft.covered(now)
        return stats_pb2.ModelStats(
            model=model,
            running=self.running,
            waiting=waiting,
            completed=ends[Outcome.ANSWERED],
            good=round(good),
            failed=ends[Outcome.FAILED] + ends[Outcome.REFUSED] + ends[Outcome.EXPIRED],
            cancelled=ends[Outcome.CANCELLED],
            ttft=latency(ttft.quantiles()),
            itl=latency(itl.quantiles()),
            queue=latency(queue.quantiles()),
            requests_per_second=ends[Outcome.ANSWERED] / seconds,
            output_tokens_per_second=(ttft.count + itl.count) / seconds,
            prompt_tokens_per_second=prompt / seconds,
            goodput=good / seconds,
            cache_hit_rate=cached / prompt if prompt else 0.0,
            replays=round(replays),
        )


class RecentStats(Meter):
    """The meter behind GetStats."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is in seconds and never goes back."""
        self._clock = clock
        self._models: dict[str, ModelWindow] = {}

    def started(self, model: str) -> None:
        self._of(model).running += 1

    def first_token(self, model: str, seconds: float) -> None:
        self._of(model).ttft.add(self._clock(), seconds)

    def gap(self, model: str, seconds: float) -> None:
        self._of(model).itl.add(self._clock(), seconds)

    def queued(self, model: str, seconds: float) -> None:
        self._of(model).queue.add(self._clock(), seconds)

    def ended(self, ended: Ended) -> None:
        window, now, usage = self._of(ended.model), self._clock(), ended.usage
        window.running -= 1
        window.ends[ended.outcome].add(now, 1.0)
        window.good.add(now, float(ended.verdict is Verdict.MET))
        window.replays.add(now, usage.replays)
        if ended.outcome is Outcome.ANSWERED:
            window.prompt_tokens.add(now, usage.prompt_tokens)
            window.cached_tokens.add(now, usage.cached_tokens)

    def told(self, model: str, waiting: int) -> stats_pb2.ModelStats:
        """One model's figures now."""
        return self._of(model).told(model, waiting, self._clock())

    def _of(self, model: str) -> ModelWindow:
        window = self._models.get(model)
        if window is None:
            window = self._models[model] = ModelWindow(self._clock())
        return window


def latency(seconds: Quantiles) -> stats_pb2.LatencyStats:
    """Seconds to the milliseconds of the API."""
    return stats_pb2.LatencyStats(
        count=seconds.count,
        mean_ms=1e3 * seconds.mean,
        p50_ms=1e3 * seconds.p50,
        p90_ms=1e3 * seconds.p90,
        p99_ms=1e3 * seconds.p99,
        max_ms=1e3 * seconds.greatest,
    )
