"""When a failed call is made again. Decisions alone: no clock, no randomness of its own, no waiting."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.errors import NoCapacity, PdserveError, Unavailable


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and how long apart, in seconds. `max_retries` comes on top of the first try; 0 never retries.

    A refusal that says when to come back is believed to the letter. Elsewhere the wait before retry n (from 0) is drawn
    evenly from 0 to `initial_backoff` * 2**n, or to `max_backoff` where that is less: clients that failed together
    must not come back together.
    """

    max_retries: int = 2
    initial_backoff: float = 0.5
    max_backoff: float = 8.0

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.max_retries < 0:
            raise ValueError(f"max_retries must not be negative, got {self.max_retries}")
        if not 0.0 < self.initial_backoff <= self.max_backoff:
            raise ValueError(
                f"0 < initial_backoff <= max_backoff must hold, got {self.initial_backoff} and {self.max_backoff}"
            )


DEFAULT_RETRIES = RetryPolicy()
NO_RETRIES = RetryPolicy(max_retries=0)


@dataclass(frozen=True, slots=True)
class Retry:
    """A call that failed and will be made again: `number` counts from 1, `delay` is the seconds until then."""

    method: str
    number: int
    delay: float
    error: PdserveError


def worth_another_try(error: PdserveError) -> bool:
    """Whether another try, here or elsewhere, may end otherwise.

    Unavailable is: nobody was reached, or who was is leaving, and generating changes nothing on the server that a
    second try could disturb. So is a NoCapacity that carries a time. One that does not may be a message over a size
    limit, and comes out the same each time; so does everything else.
    """
    return isinstance(error, Unavailable) or (isinstance(error, NoCapacity) and error.retry_after is not None)


def retry_delay(
    policy: RetryPolicy, error: PdserveError, retries: int, remaining: float | None, chance: float
) -> float | None:
    """Seconds until the call should be made again; None: give up now.

    `retries` is how many were made already, `remaining` the seconds to the deadline (None: there is none), `chance` a
    number from [0, 1). A wait that the deadline does not outlast is not begun: the caller learns of the failure while
    there is time to do something else.

    Only for what is `worth_another_try`; a time that the error carries is kept.
    """
    if retries >= policy.max_retries or not worth_another_try(error):
        return None
    if isinstance(error, NoCapacity | Unavailable) and error.retry_after is not None:
        delay = error.retry_after
    else:
        # Capped before it is a float: 2.0**1024 is none.
        delay = chance * min(policy.max_backoff, policy.initial_backoff * 2.0 ** min(retries, 64))
    return delay if remaining is None or delay < remaining else None
