"""The tries at one call: how often, until when, and what is told of them. Whoever makes the calls does the waiting."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from pdserve.client.retry import Retry, RetryPolicy, retry_delay
from pdserve.rpc.errors import error_from_call

CALL_TIMEOUT = 10.0  # seconds, for calls that compute nothing
log = logging.getLogger("pdserve.client")


@dataclass(frozen=True, slots=True)
class CallSettings:
    """What a client does with each of its calls; see `Client`."""

    timeout: float | None
    retry: RetryPolicy
    on_retry: Callable[[Retry], None] | None
    wait_for_ready: bool
    """Of the router whose turn it is."""


class Attempts:
    """One call's tries. `now` is any clock in seconds, the same for all of them."""

    def __init__(
        self, settings: CallSettings, method: str, timeout: float | None, now: float, targets: int = 1
    ) -> None:
        """`timeout` in seconds, for all tries together; None and math.inf: no deadline. Each failure goes on to the
        next of `targets`."""
        self.method = method
        self.retries = 0  # since there was progress
        self._targets = targets
        self._progress = 0
        self._settings = settings
        self._deadline = None if timeout is None or math.isinf(timeout) else now + timeout

    def remaining(self, now: float) -> float | None:
        """Seconds that a try which begins now may take; None: no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - now)

    def failed(self, call: grpc.RpcError, now: float, *, again: bool = True, progress: int = 0) -> float:
        """Seconds to wait before the next try, which is logged and told to `on_retry`. `progress` is how far the call
        has come by now, over all its tries: retries are counted from the latest.

        Raises what the server meant where there is none: `again` forbids it, the policy does, or the time is up.
        """
        error = error_from_call(call)
        settings = self._settings
        if progress > self._progress:
            self.retries, self._progress = 0, progress
        others = self._targets - 1 - self.retries
        delay = None
        if again:
            delay = retry_delay(settings.retry, error, self.retries, self.remaining(now), random.random(), others)
        if delay is None:
            try:
                raise error from call
            finally:
                del error  # or its traceback and this frame hold each other, and grpc's call, whose channel lives on
        self.retries += 1
        log.info("%s failed (%s); retry %d in %.3f s", self.method, error, self.retries, delay)
        if settings.on_retry is not None:
            settings.on_retry(Retry(self.method, self.retries, delay, error))
        return delay
