"""How fast a worker is, learned from its own steps: a line through what it saw, newer steps counting for more.

A step that computes `new` prompt tokens, which attend to pairs of tokens worth `squares` (the sum of l^2 - p^2 over
its chunks: l tokens with KV after it, p before), and one token for each of `decoding` answers with `context` tokens of
KV in all, takes

    seconds = step + token x new + square x squares + answer x decoding + read x context

which is DistServe's latency model (OSDI 2024, appendix A) with its coefficients measured instead of derived. Recursive
least squares with exponential forgetting (Ljung, System Identification, 2nd ed., 11.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ENOUGH = 4  # steps of a kind; the first ones are cold
# A step counts half as much after about 350 more.
FORGETTING = 0.998
# Values that bring the five inputs to about 1, so that one start fits all: tokens of a chunk, of a prompt squared,
# answers in a batch, tokens of their contexts.
_SCALES = (1.0, 512.0, 2.0**20, 16.0, 16384.0)
# A step that took more than so many times what was expected, of kinds that were seen often enough, tells of what held
# it up (a stopped process, a machine that swaps), and counts as so many times: a worker that is taken for slow gets
# nothing to do, and would not learn better. One that stays slow is believed hardly later for that.
_SURPRISE, _SEEN = 10.0, 16
_DOUBT = 1e3  # variance before anything was seen; also what forgetting may at most raise it to
_COUNT = len(_SCALES)


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


class SpeedEstimate:
    """One worker's. Feed it every step; ask `speed` at any time."""

    def __init__(self) -> None:
        self._weights = [0.0] * _COUNT
        self._variance = [[_DOUBT if row == column else 0.0 for column in range(_COUNT)] for row in range(_COUNT)]
        self._prompts = self._answers = 0

    def observe(self, new: int, squares: int, decoding: int, context: int, seconds: float) -> None:
        """Take in one step. Costs some ten microseconds."""
        values = (1, new, squares, decoding, context)
        x = [(k, value / _SCALES[k]) for k, value in enumerate(values) if value]
        px = [sum([row[k] * value for k, value in x]) for row in self._variance]
        gain = FORGETTING + sum([px[k] * value for k, value in x])
        expected = sum([self._weights[k] * value for k, value in x])
        if expected > 0 and (not new or self._prompts >= _SEEN) and (not decoding or self._answers >= _SEEN):
            seconds = min(seconds, _SURPRISE * expected)
        error = (seconds - expected) / gain
        self._weights = [weight + error * p for weight, p in zip(self._weights, px, strict=True)]
        shares = [p / gain for p in px]
        variance = [
            [cell - share * p for cell, p in zip(row, px, strict=True)]
            for row, share in zip(self._variance, shares, strict=True)
        ]
        # What steps of one kind never tell must not be forgotten either: its doubt would grow without bound.
        if max([variance[k][k] for k in range(_COUNT)]) < _DOUBT * FORGETTING:
            variance = [[cell / FORGETTING for cell in row] for row in variance]
        self._variance = variance
        self._prompts += new > 0
        self._answers += decoding > 0

    @property
    def speed(self) -> Speed:
        step, token, square, answer, read = (
            max(0.0, weight / scale) for weight, scale in zip(self._weights, _SCALES, strict=True)
        )
        return Speed(step, token, square, answer, read, self._prompts, self._answers)


def squares(chunks: Sequence[tuple[int, int]]) -> int:
    """Of chunks (tokens that have KV, tokens to compute): the sum of the differences of squares."""
    return sum((before + count) ** 2 - before**2 for before, count in chunks)
