"""The tries at one call: how often, until when, and what is told of them. Whoever makes the calls does the waiting."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from pdserve.client.retry import Retry, RetryPolicy, retry_delay
from pdserve.core.errors import NoCapacity, PdserveError, Unavailable
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

    def check(self, targets: Sequence[str]) -> None:
        """Raises ValueError for what contradicts itself."""
        if self.wait_for_ready and len(targets) > 1:
            raise ValueError("wait_for_ready waits for one router; of several the next one is asked instead")


class Attempts:
    """One call's tries. `now` is any clock in seconds, the same for all of them."""

    def __init__(
        self, settings: CallSettings, method: str, timeout: float | None, now: float, targets: int = 1
    ) -> None:
        """`timeout` in seconds, for all tries together; None and math.inf: no deadline. There are so many `targets`."""
        self.method = method
        self.retries = 0  # since there was progress
        # After a failure: ask another target, since this one is lost (True) or full (False). None: ask it again.
        self.move: bool | None = None
        self._waits = 0  # of the retries, those that the policy counts
        self._asked = 1  # targets
        self._targets = targets
        self._progress = 0
        self._settings = settings
        self._deadline = None if timeout is None or math.isinf(timeout) else now + timeout

    def remaining(self, now: float) -> float | None:
        """Seconds that a try which begins now may take; None: no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - now)

    def failed(self, call: grpc.RpcError, now: float, *, again: bool = True, progress: int = 0) -> float:
        """Seconds to wait before the next try, which is logged and told to `on_retry`; `move` says whom to ask.
        `progress` is how far the call has come by now, over all its tries: retries are counted from the latest.

        A target that was not asked yet is asked at once. Raises what the server meant where there is no other try:
        `again` forbids it, the policy does, or the time is up.
        """
        error = error_from_call(call)
        settings = self._settings
        if progress > self._progress:
            self.retries, self._waits, self._asked, self._progress = 0, 0, 1, progress
        delay, lost = None, isinstance(error, Unavailable)
        if again:
            delay = self._delay(error, self.remaining(now))
        if delay is None:
            try:
                raise error from call
            finally:
                del error  # or its traceback and this frame hold each other, and grpc's call, whose channel lives on
        self.retries += 1
        self.move = lost if lost or delay == 0.0 else None
        log.info("%s failed (%s); retry %d in %.3f s", self.method, error, self.retries, delay)
        if settings.on_retry is not None:
            settings.on_retry(Retry(self.method, self.retries, delay, error))
        return delay

    def _delay(self, error: PdserveError, remaining: float | None) -> float | None:
        policy = self._settings.retry
        worth_asking = isinstance(error, Unavailable) or (
            isinstance(error, NoCapacity) and error.retry_after is not None
        )
        if self._asked < self._targets and worth_asking and policy.max_retries and remaining != 0.0:
            self._asked += 1
            return 0.0
        delay = retry_delay(policy, error, self._waits, remaining, random.random())
        self._waits += 1
        return delay
