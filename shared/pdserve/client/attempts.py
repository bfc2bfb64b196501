"""The tries at one call: how often, until when, and what is told of them. Whoever makes the calls does the waiting."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc

from pdserve.client.retry import Retry, RetryPolicy, retry_delay, worth_another_try
from pdserve.client.targets import Rotation, Turn
from pdserve.core.errors import PdserveError, Unavailable
from pdserve.rpc.errors import error_from_call

CALL_TIMEOUT = 10.0  # seconds, for calls that compute nothing
log = logging.getLogger("pdserve.client")
T = TypeVar("T")


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


class Attempts(Generic[T]):
    """One call's tries, at one of `targets` after the other. `now` is any clock in seconds, the same for all tries."""

    def __init__(
        self, settings: CallSettings, method: str, timeout: float | None, now: float, targets: Rotation[T]
    ) -> None:
        """`timeout` in seconds, for all tries together; None and math.inf: no deadline."""
        self.method = method
        self.retries = 0  # since there was progress
        self._waits = 0  # of the retries, those that the policy counts
        self._turn = Turn(targets)
        self._others = self._turn.others  # that were not asked yet
        self._progress = 0
        self._settings = settings
        self._deadline = None if timeout is None or math.isinf(timeout) else now + timeout

    @property
    def target(self) -> T:
        """Whom to ask now."""
        return self._turn.current

    def remaining(self, now: float) -> float | None:
        """Seconds that a try which begins now may take; None: no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - now)

    def failed(self, call: grpc.RpcError, now: float, *, again: bool = True, progress: int = 0) -> float:
        """Seconds to wait before the next try, which is logged and told to `on_retry`. `progress` is how far the call
        has come by now, over all its tries: retries are counted from the latest.

        A target that was not asked yet is asked at once; the last one, where it is full, again when it said.
        Raises what the server meant where there is no other try: `again` forbids it, the policy does, or time is up.
        """
        error = error_from_call(call)
        settings = self._settings
        if progress > self._progress:
            self.retries, self._waits, self._progress = 0, 0, progress
            self._others = self._turn.others
        delay = self._delay(error, self.remaining(now)) if again else None
        if delay is None:
            try:
                raise error from call
            finally:
                del error  # or its traceback and this frame hold each other, and grpc's call, whose channel lives on
        self.retries += 1
        if (lost := isinstance(error, Unavailable)) or not delay:
            self._turn.move(lost=lost)
        log.info("%s failed (%s); retry %d in %.3f s", self.method, error, self.retries, delay)
        if settings.on_retry is not None:
            settings.on_retry(Retry(self.method, self.retries, delay, error))
        return delay

    def _delay(self, error: PdserveError, remaining: float | None) -> float | None:
        policy = self._settings.retry
        if self._others and policy.max_retries and remaining != 0.0 and worth_another_try(error):
            self._others -= 1
            return 0.0
        delay = retry_delay(policy, error, self._waits, remaining, random.random())
        self._waits += 1
        return delay
