"""Who computes how many tokens in one engine step, and who has to go when the pages run out."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

from pdserve.policy.estimate import Speed

SHARE = 0.8  # of a target is what a step is planned to take: no two steps take the same
JOINING = 0.5  # and of that, where answers join that were begun elsewhere: they wait out one step, and sit in the next
JOINED = 64  # steps with prompts, after an answer was announced that is begun elsewhere, in which more may follow
LEAST = 32  # tokens that the first prompt goes on by in any case: shorter steps read the weights for too little


class Work(NamedTuple):
    """One sequence's wish: `pending` tokens without KV, behind `before` that have it; `prefill` while input is among
    them. `target` are the seconds that an answer's gaps should not exceed, None: nobody asked."""

    pending: int
    prefill: bool
    before: int = 0
    target: float | None = None


def plan_step(work: Sequence[Work], budget: int, speed: Speed | None = None, joining: float | None = None) -> list[int]:
    """Tokens to compute for each of `work`, in its order.

    Running answers get one token each in every step, so that neither a prompt nor a small budget stalls a stream;
    prompts share what they leave of `budget`, in order, the first as much as fits (chunked prefill, Sarathi-Serve,
    arXiv:2403.02310). By an engine's own `speed` they also stay within what the shortest target of the running answers
    leaves: a budget in tokens alone is too long for a slow machine, and too short for a fast one. `joining` is the
    target, in seconds, of answers that come from elsewhere at any moment; None: none do, or nobody asked.
    """
    counts = [0 if item.prefill else min(item.pending, 1) for item in work]
    answers = [item for item in work if not item.prefill]
    if len(answers) == len(work):
        return counts
    budget = max(budget - sum(counts), 1)  # prompts go on, if only by a token
    pace = _Pace(answers, speed, joining) if speed is not None and speed.knows_prompts else None
    first = True
    for index, item in enumerate(work):
        if item.prefill and budget > 0:
            most = budget if pace is None else min(budget, max(pace.tokens(item.before), LEAST if first else 0))
            counts[index], first = min(item.pending, most), False
            budget -= counts[index]
            if pace is not None:
                pace.take(item.before, counts[index])
    return counts


class _Pace:
    """The seconds that answers leave for prompts in a step; unbounded where none has a target."""

    def __init__(self, answers: Sequence[Work], speed: Speed, joining: float | None) -> None:
        targets = [item.target for item in answers if item.target is not None]
        targets += [] if joining is None else [JOINING * joining]
        context = sum([item.before for item in answers])
        self._speed = speed
        self._left = SHARE * min(targets) - speed.decode_seconds(len(answers), context) if targets else math.inf

    def tokens(self, before: int) -> int:
        """How many of a prompt fit, behind `before` that have KV: the root of square n^2 + (token + 2 square before) n
        less the seconds that are left."""
        if self._left == math.inf:
            return sys.maxsize
        square, token = self._speed.square, self._speed.token + 2 * self._speed.square * before
        if self._left <= 0 or not (square or token):
            return 0 if self._left <= 0 else sys.maxsize
        # In this form it is exact where `square` is 0, too.
        return int(2 * self._left / (token + math.sqrt(token * token + 4 * square * self._left)))

    def take(self, before: int, count: int) -> None:
        speed = self._speed
        self._left -= speed.token * count + speed.square * ((before + count) ** 2 - before**2)


class Joining:
    """The shortest target of the answers that come from elsewhere at any moment (`plan_step`): of those that were
    announced within the latest JOINED steps with prompts, since where one came more will. So nobody's wish lasts longer
    than there are answers like it."""

    def __init__(self) -> None:
        self._until: dict[float, int] = {}  # by target, the last step that it counts in
        self._step = 0

    def announce(self, target: float | None) -> None:
        """One will come; its gaps should not exceed `target` seconds. None: nobody asked."""
        if target is not None:
            self._until[target] = self._step + JOINED

    def next(self) -> float | None:
        """What to plan the next step with prompts by."""
        self._step += 1
        self._until = {target: last for target, last in self._until.items() if last >= self._step}
        return min(self._until, default=None)


class Claim(NamedTuple):
    """What a sequence's right to its pages rests on: higher priority first, then lower (older) order."""

    priority: int
    order: int


def choose_victim(claims: Sequence[Claim]) -> int:
    """Index of the sequence to preempt: lowest priority, then youngest. So the oldest always comes to its end."""
    return min(range(len(claims)), key=lambda index: (claims[index].priority, -claims[index].order))
