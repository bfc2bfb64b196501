"""What one tenant may have: so many requests at a time, and so many tokens a minute.

Tokens are a bucket that fills at one minute's rate and holds a minute's worth. At the door a request takes its prompt
and the answer that it probably gets, and is settled at its end; so an answer that is longer than expected is paid for
by the next request. One that is larger than the whole bucket is let in when that is full, and leaves a debt: over time
the rate holds for any size.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pdserve.policy.admission import RETRY_MAX, RETRY_MIN

REMEMBERED = 4096  # tenants without a request; one that was forgotten has a full bucket again
_MINUTE = 60.0
_EWMA = 0.2
_UNKNOWN = 1.0  # seconds to wait for a request to end, where none has ended yet
_GRAIN = 1e-6  # tokens; so that whoever waits as long as was told finds enough


class Limit(StrEnum):
    REQUESTS = "tenant_requests"
    TOKENS = "tenant_tokens"


@dataclass(frozen=True, slots=True)
class Refusal:
    """`retry_after` is in seconds: exactly when there are tokens enough, and about when a request will have ended."""

    limit: Limit
    reason: str
    retry_after: float


@dataclass(slots=True)
class _Account:
    """`level` are the tokens that were in the bucket at the time `at`; below 0 they are owed. `seconds` is how long its
    requests take, smoothed; 0: none has ended."""

    level: float
    at: float
    requests: int = 0
    seconds: float = 0.0


class TenantLimits:
    """The accounts of all tenants. Time is an argument, in seconds of any clock that never goes back."""

    def __init__(
        self, max_requests: int | None = None, tokens_per_minute: int | None = None, remembered: int = REMEMBERED
    ) -> None:
        """None: no limit of that kind."""
        self._max_requests, self._tokens = max_requests, tokens_per_minute
        self._remembered = remembered
        self._accounts: dict[str, _Account] = {}
        self._idle: dict[str, None] = {}  # tenants without a request, longest idle first

    def enter(self, tenant: str, now: float) -> Refusal | None:
        """One more request is here. Not refused, it counts until `leave`."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(float(self._tokens or 0), now)
        most = self._max_requests
        if most is not None and account.requests >= most:
            # So many at a time end one after the other in the time that each takes.
            seconds = account.seconds / most if account.seconds else _UNKNOWN
            reason = f"the tenant has {account.requests} requests here already"
            return Refusal(Limit.REQUESTS, reason, min(RETRY_MAX, max(RETRY_MIN, seconds)))
        self._idle.pop(tenant, None)
        account.requests += 1
        return None

    def spend(self, tenant: str, tokens: int, now: float) -> Refusal | None:
        """A request that has entered wants so many tokens. Not refused, they are taken."""
        most = self._tokens
        if most is None:
            return None
        account = self._filled(tenant, now)
        missing = min(tokens, most) - account.level
        if missing > _GRAIN:
            reason = f"{tokens} tokens are more than is left of the tenant's {most} a minute"
            return Refusal(Limit.TOKENS, reason, missing * _MINUTE / most)
        account.level -= tokens
        return None

    def settle(self, tenant: str, taken: int, used: int, now: float) -> None:
        """Of the tokens that a request has taken it used so many; the rest goes back, and more is taken."""
        if self._tokens is not None:
            account = self._filled(tenant, now)
            account.level = min(float(self._tokens), account.level + taken - used)

    def leave(self, tenant: str, seconds: float | None) -> None:
        """A request that had entered is over, after so many seconds; None: it was refused, and says nothing of how long
        requests take."""
        account = self._accounts[tenant]
        account.requests -= 1
        if seconds is not None:
            account.seconds += _EWMA * (seconds - account.seconds) if account.seconds else seconds
        if not account.requests:
            self._idle[tenant] = None
            while len(self._idle) > self._remembered:
                oldest = next(iter(self._idle))
                del self._idle[oldest], self._accounts[oldest]

    def __len__(self) -> int:
        """How many tenants it remembers."""
        return len(self._accounts)

    def _filled(self, tenant: str, now: float) -> _Account:
        """The account as it is by now."""
        account, most = self._accounts[tenant], self._tokens or 0
        account.level = min(float(most), account.level + (now - account.at) * most / _MINUTE)
        account.at = now
        return account
