"""How fast a worker is, learned from its own steps: a line through what it saw, newer steps counting for more.

A step that computes `new` prompt tokens, which attend to pairs of tokens worth `squares` (the sum of l^2 - p^2 over
its chunks: l tokens with KV after it, p before), and one token for each of `decoding` answers with `context` tokens of
KV in all, takes

    seconds = step + token x new + square x squares + answer x decoding + read x context

which is DistServe's latency model (OSDI 2024, appendix A) with its coefficients measured instead of derived. They are
the weighted least squares over all steps under the condition that none is negative (Lawson and Hanson, Solving Least
Squares Problems, 1974, chapter 23). To let a negative one count as 0 afterwards would leave the others too large: a
line that went through every step would then go through none. Steps are weighed by what they took, so that what counts
is by which share a prediction is wrong: a prompt's jitter of 50 ms says nothing of a batch that takes 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ENOUGH = 4  # steps of a kind; the first one is cold, and not looked at
# A step counts half as much after about 70 more of its kind.
FORGETTING = 0.99
# Values that bring the five inputs to about 1, so that one start fits all: tokens of a chunk, of a prompt squared,
# answers in a batch, tokens of their contexts.
_SCALES = (1.0, 512.0, 2.0**20, 16.0, 16384.0)
# A step that took more than so many times what is known to be usual for its kind tells of what held it up (a stopped
# process, a machine that swaps), and counts as so many times: a worker that is taken for slow gets nothing to do, and
# would not learn better. One that stays slow is believed step by step.
_SURPRISE = 3.0
# One that took less than the first part of what was expected is no accident: it was expected wrongly. Its error counts
# as a share of what it took, down to the second part.
_BY_CHANCE, _FASTEST = 0.5, 1e-3
# Known is what so many steps of its kind would tell.
_SEEN = 4.0
_PRIOR = 1e-4  # of a step; what coefficients are held at 0 by before anything is known of them
_SHORTEST = 1e-6  # seconds that a step takes at least
_COUNT = len(_SCALES)
_EVERY = tuple(range(_COUNT))
_HELD = 2.0  # steps as each of these, which are what stays known of its kind when no such step comes for long
_RENEWED = 16  # steps, after which that is weighed anew

Matrix = list[list[float]]


@dataclass(frozen=True, slots=True)
class Speed:
    """Coefficients in seconds, each 0 or more, as named above. `prompts` and `answers` are the steps with prompts and
    with answers that they were learned from: where there were few, nothing is known of such work."""

    step: float = 0.0
    token: float = 0.0
    square: float = 0.0
    answer: float = 0.0
    read: float = 0.0
    prompts: int = 0
    answers: int = 0

    @property
    def knows_prompts(self) -> bool:
        return self.prompts >= ENOUGH

    @property
    def knows_answers(self) -> bool:
        return self.answers >= ENOUGH

    def prompt_seconds(self, new: int, squares: int, chunk: int) -> float:
        """For prompts of `new` tokens in all, worth `squares`, alone, in chunks of at most `chunk`."""
        steps = -(-new // chunk) if chunk > 1 else new
        return self.step * steps + self.token * new + self.square * squares

    def decode_seconds(self, decoding: int, context: int) -> float:
        """For one step of answers alone: what lies between two tokens of each."""
        return self.step + self.answer * decoding + self.read * context


UNKNOWN = Speed()
# What to compare work by where no worker has said anything.
NOMINAL = Speed(step=5e-3, token=1e-4, answer=1e-4, read=1e-7)


def _scaled(*work: int) -> list[float]:
    return [value / scale for value, scale in zip((1, *work), _SCALES, strict=True)]


# Short and long chunks, and one far into its prompt; few and many answers, short and long ones. An hour of single
# answers leaves no trace in the data of what a batch or a prompt takes, and what little one more step says of that
# would be believed. So they are held at what they are thought to take, whatever that is by now.
_PROMPTS = _scaled(16, 16**2, 0, 0), _scaled(512, 512**2, 0, 0), _scaled(64, 2048**2 - 1984**2, 0, 0)
_ANSWERS = tuple(_scaled(0, 0, count, count * length) for count in (1, 16) for length in (16, 2048))


class SpeedEstimate:
    """One worker's. Feed it every step; ask `speed` at any time."""

    def __init__(self) -> None:
        # The sums of x x^T and of x y over all steps, as far as they are not forgotten.
        self._information: Matrix = [[_PRIOR if row == column else 0.0 for column in _EVERY] for row in _EVERY]
        self._moments = [0.0] * _COUNT
        self._weights = [0.0] * _COUNT
        self._held: Matrix = []  # what is added to the first at each step, so that nothing is forgotten altogether
        self._steps = self._prompts = self._answers = 0

    def observe(self, new: int, squares: int, decoding: int, context: int, seconds: float) -> None:
        """Take in one step. Costs some fifty microseconds."""
        cold = (new > 0 and not self._prompts) or (decoding > 0 and not self._answers)
        self._prompts += new > 0
        self._answers += decoding > 0
        if not cold:
            self._take_in(_scaled(new, squares, decoding, context), seconds)

    def _take_in(self, x: list[float], seconds: float) -> None:
        level, expected = sum(self._weights), _dot(self._weights, x)
        seconds = base = max(seconds, _SHORTEST)
        if seconds <= expected:
            base = expected if seconds > _BY_CHANCE * expected else max(seconds, _FASTEST * expected)
        elif expected > 0 and _SEEN * level**2 * _dot(solve(self._information, x, _EVERY), x) <= expected**2:
            base, seconds = expected, min(seconds, _SURPRISE * expected)
        # An error counts as a share of what was expected, and as much at any pace of the machine.
        weight = (level / base) ** 2 if level else 1.0
        if self._steps % _RENEWED == 0:
            self._held = self._hold(level)
        held = [_dot(row, self._weights) for row in self._held]
        self._moments = [
            FORGETTING * moment + weight * seconds * value + kept
            for moment, value, kept in zip(self._moments, x, held, strict=True)
        ]
        for row, kept_row, value in zip(self._information, self._held, x, strict=True):
            part = weight * value
            row[:] = [FORGETTING * cell + part * b + kept for cell, b, kept in zip(row, x, kept_row, strict=True)]
        self._weights = nonnegative(self._information, self._moments)
        if base < expected and (fallen := min(1.0, sum(self._weights) / level)) < 1.0:
            self._fade(fallen**2)
        self._steps += 1

    def _fade(self, share: float) -> None:
        """Let all that is known count for `share` of it: at a quicker pace the same error is less."""
        self._moments = [share * moment for moment in self._moments]
        for row in self._information:
            row[:] = [share * cell for cell in row]

    def _hold(self, level: float) -> Matrix:
        held = [[(1.0 - FORGETTING) * _PRIOR if row == column else 0.0 for column in _EVERY] for row in _EVERY]
        for seen, steps in ((self._prompts, _PROMPTS), (self._answers, _ANSWERS)):
            for x in steps if seen >= ENOUGH else ():
                if (expected := _dot(self._weights, x)) > 0:
                    strength = (1.0 - FORGETTING) * _HELD * (level / expected) ** 2
                    for row, value in zip(held, x, strict=True):
                        row[:] = [cell + strength * value * b for cell, b in zip(row, x, strict=True)]
        return held

    def expected(self, new: int, squares: int, decoding: int, context: int) -> float:
        """Seconds that such a step takes; 0 where nothing was seen yet."""
        return _dot(self._weights, _scaled(new, squares, decoding, context))

    @property
    def speed(self) -> Speed:
        step, token, square, answer, read = (
            weight / scale for weight, scale in zip(self._weights, _SCALES, strict=True)
        )
        return Speed(step, token, square, answer, read, self._prompts, self._answers)


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum([one * other for one, other in zip(a, b, strict=True)])


def nonnegative(matrix: Matrix, moments: Sequence[float]) -> list[float]:
    """The w of no negative value that makes w' matrix w - 2 moments' w least; `matrix` is positive definite.

    Lawson and Hanson's active sets, begun with all, which mostly is the end of it.
    """
    found = solve(matrix, moments, _EVERY)
    if min(found) >= 0.0:
        return found
    size = len(moments)
    found, chosen = [0.0] * size, list[int]()
    # Each round makes it less, so that no set comes again. Rounding may see it otherwise, and 3 a value are plenty.
    for _ in range(3 * size):
        slopes = [
            (moments[k] - sum([a * b for a, b in zip(matrix[k], found, strict=True)])) / math.sqrt(matrix[k][k])
            for k in range(size)
        ]
        most = max((k for k in range(size) if k not in chosen), key=slopes.__getitem__, default=0)
        if most in chosen or slopes[most] <= 0.0:
            break
        chosen.append(most)
        wanted = solve(matrix, moments, chosen)
        while below := [k for k in chosen if wanted[k] < 0.0]:
            # As far towards it as none gets negative; whoever is 0 there leaves.
            reach, gone = min((found[k] / (found[k] - wanted[k]), k) for k in below)
            found = [max(0.0, old + reach * (new - old)) for old, new in zip(found, wanted, strict=True)]
            found[gone] = 0.0
            chosen.remove(gone)
            wanted = solve(matrix, moments, chosen)
        found = wanted
    return found


def solve(matrix: Matrix, right: Sequence[float], places: Sequence[int]) -> list[float]:
    """matrix w = right in `places` alone, 0 in the others; by Cholesky's factors of a positive definite matrix."""
    lower: Matrix = []
    halfway: list[float] = []
    for row in places:
        line: list[float] = []
        for column, above in enumerate(lower):
            line.append(
                (matrix[row][places[column]] - sum([a * b for a, b in zip(line, above, strict=False)])) / above[column]
            )
        rest = matrix[row][row] - sum([value * value for value in line])
        # Where rounding leaves nothing of it, next to nothing is known: that counts as 0.
        line.append(math.sqrt(rest) if rest > 0.0 else math.inf)
        halfway.append((right[row] - sum([a * b for a, b in zip(line, halfway, strict=False)])) / line[-1])
        lower.append(line)
    found = [0.0] * len(right)
    for index in range(len(places) - 1, -1, -1):
        value = halfway[index] / lower[index][index]
        found[places[index]] = value
        for below in range(index):
            halfway[below] -= lower[index][below] * value
    return found


def squares(chunks: Sequence[tuple[int, int]]) -> int:
    """Of chunks (tokens that have KV, tokens to compute): the sum of the differences of squares."""
    return sum((before + count) ** 2 - before**2 for before, count in chunks)
