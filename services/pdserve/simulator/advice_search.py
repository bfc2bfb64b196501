"""Searching for the most that is kept, with few questions: each one is a simulation."""

from __future__ import annotations

import math
from collections.abc import Callable

WIDEST = 1 << 12  # a rate is looked for within so many times the first guess, each way


def highest(serves: Callable[[float], bool], start: float, tolerance: float) -> float:
    """The highest rate that is served, `tolerance` (0.02: two percent) below it at most; 0 where none near `start` is.

    `serves(rate)` must not become true again above a rate where it is false.
    """
    low, high = start, start
    if serves(start):
        while serves(high := 2 * low):
            low = high
            if low > start * WIDEST:
                return low
    else:
        while not serves(low := high / 2):
            high = low
            if high < start / WIDEST:
                return 0.0
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if serves(middle) else (low, middle)
    return low


def higher(serves: Callable[[float], bool], best: float, tolerance: float) -> float | None:
    """As `highest`, where it is above `best` by more than `tolerance`; one question tells that it is not."""
    start = best * (1 + tolerance)
    return highest(serves, start, tolerance) if serves(start) else None


def smallest(serves: Callable[[int], bool], start: int, most: int, least: int = 1) -> int | None:
    """The smallest number from `least` to `most` that serves; None where `most` does not.

    `serves(number)` must not become false again above a number where it is true. Asks around `start` first.
    """
    number = min(max(start, least), most)
    step = 1
    if serves(number):
        high = number
        while high > least and serves(low := max(least, high - step)):
            high, step = low, 2 * step
        if high == least:
            return high
    else:
        low = number
        while low < most and not serves(high := min(most, low + step)):
            low, step = high, 2 * step
        if low == most:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if serves(middle) else (middle, high)
    return high
