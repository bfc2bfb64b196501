"""What one tenant, or one key, may have: so many requests at a time, and so many tokens a minute.

Tokens are a bucket that fills at one minute's rate and holds a minute's worth. At the door a request takes its prompt
and the answer that it probably gets, and is settled at its end; so an answer that is longer than expected is paid for
by the next request. One that is larger than the whole bucket is let in when that is full, and leaves a debt: over time
the rate holds for any size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from pdserve.policy.admission import RETRY_MAX, RETRY_MIN

REMEMBERED = 4096  # accounts without a request; one that was forgotten has a full bucket again
_MINUTE = 60.0
_EWMA = 0.2
_UNKNOWN = 1.0  # seconds to wait for a request to end, where none has ended yet
_GRAIN = 1e-6  # tokens; so that whoever waits as long as was told finds enough


class Whose(StrEnum):
    TENANT = "tenant"
    KEY = "key"


class Limit(StrEnum):
    REQUESTS = "tenant_requests"
    TOKENS = "tenant_tokens"
    KEY_REQUESTS = "key_requests"
    KEY_TOKENS = "key_tokens"


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one account may have; None: no limit of that kind."""

    max_requests: int | None = None
    tokens_per_minute: int | None = None
    whose: Whose = Whose.TENANT


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


class Limits:
    """The accounts of all tenants, or of all keys, by name. Time is an argument, in seconds of any clock that never
    goes back. What an account may have is one, too, and may be another at any time."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._accounts: dict[str, _Account] = {}
        self._idle: dict[str, None] = {}  # those without a request, longest idle first

    def enter(self, name: str, allowance: Allowance, now: float) -> Refusal | None:
        """One more request is here. Not refused, it counts until `leave`."""
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account(math.inf, now)
        most = allowance.max_requests
        if most is not None and account.requests >= most:
            # So many at a time end one after the other in the time that each takes.
            seconds = account.seconds / most if account.seconds else _UNKNOWN
            reason = f"the {allowance.whose} has {account.requests} requests here already"
            return Refusal(Limit(f"{allowance.whose}_requests"), reason, min(RETRY_MAX, max(RETRY_MIN, seconds)))
        self._idle.pop(name, None)
        account.requests += 1
        return None

    def spend(self, name: str, allowance: Allowance, tokens: int, now: float) -> Refusal | None:
        """A request that has entered wants so many tokens. Not refused, they are taken."""
        most = allowance.tokens_per_minute
        if most is None:
            return None
        account = self._filled(name, most, now)
        missing = min(tokens, most) - account.level
        if missing > _GRAIN:
            reason = f"{tokens} tokens are more than is left of the {allowance.whose}'s {most} a minute"
            return Refusal(Limit(f"{allowance.whose}_tokens"), reason, missing * _MINUTE / most)
        account.level -= tokens
        return None

    def settle(self, name: str, allowance: Allowance, taken: int, used: int, now: float) -> None:
        """Of the tokens that a request has taken it used so many; the rest goes back, and more is taken."""
        most = allowance.tokens_per_minute
        if most is not None:
            account = self._filled(name, most, now)
            account.level = min(float(most), account.level + taken - used)

    def leave(self, name: str, seconds: float | None) -> None:
        """A request that had entered is over, after so many seconds; None: it was refused, and says nothing of how long
        requests take."""
        account = self._accounts[name]
        account.requests -= 1
        if seconds is not None:
            account.seconds += _EWMA * (seconds - account.seconds) if account.seconds else seconds
        if not account.requests:
            self._idle[name] = None
            while len(self._idle) > self._remembered:
                oldest = next(iter(self._idle))
                del self._idle[oldest], self._accounts[oldest]

    def __len__(self) -> int:
        """How many accounts it remembers."""
        return len(self._accounts)

    def _filled(self, name: str, most: int, now: float) -> _Account:
        """The account as it is by now, with `most` tokens a minute."""
        account = self._accounts[name]
        account.level = min(float(most), account.level + (now - account.at) * most / _MINUTE)
        account.at = now
        return account
