"""What becomes of a running sequence whose decode worker is going to stop: it ends there in time, or another one takes
it over with its KV."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

# Of the time that is left, what a sequence may be predicted to need and still stay. Gaps between tokens vary, and what
# stays by mistake is computed again.
STAY_SHARE = 0.5


class Leave(StrEnum):
    """Which sequences leave a decode worker that drains."""

    NEEDED = "needed"  # those that might not be through in time
    ALL = "all"  # every one, so that it can stop soon
    OFF = "off"  # none: what is not through in time is computed again elsewhere


class HandOff(StrEnum):
    """What became of a sequence on a decode worker that drains, as metrics tell it."""

    MOVED = "moved"
    STAYED = "stayed"  # as the policy says
    NO_ROOM = "no_room"  # no other decode worker had room in time, or there is none
    REFUSED = "refused"  # one had no room after all; another may be tried
    FAILED = "failed"  # link, worker or time; as above
    REPLAYED = "replayed"  # it had not left when the worker was gone, and is computed again


class Leaving(NamedTuple):
    """Whether it leaves, and why, or why not."""

    leaves: bool
    reason: str


def decide_leaving(rule: Leave, remaining: int, gap: float, grace: float) -> Leaving:
    """Decide for a sequence that may make up to `remaining` more tokens, on a worker that stops in `grace` seconds.

    `gap` is its mean gap between tokens so far, in seconds; 0: not known. An answer may end long before it has all the
    tokens that it may have, but nobody knows, and to move costs little.
    """
    if rule is Leave.OFF:
        return Leaving(False, "nothing is handed off here")
    if rule is Leave.ALL:
        return Leaving(True, "everything is handed off here")
    if not gap:
        return Leaving(True, "it is not known how long it will take")
    seconds = remaining * gap
    told = f"up to {remaining} tokens take {seconds:.1f} s, and the worker stops in {grace:.1f} s"
    return Leaving(seconds > STAY_SHARE * grace, told)
