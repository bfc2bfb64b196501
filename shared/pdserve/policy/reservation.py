"""How much of a pool a sequence takes when it is admitted.

One arithmetic for the router that predicts it and the worker that does it: where the two differ, placements are refused
after work was spent on them.
"""

from __future__ import annotations


def reserved_tokens(given: int, remaining: int, lookahead: int) -> int:
    """Tokens that get pages at admission: the input, and room for the answer's beginning.

    `remaining` is how many tokens the answer may still have (0: no answer is computed there).
    """
    return given + max(0, min(lookahead, remaining))


def fits(fresh: int, available: int, watermark: int, others: bool) -> bool:
    """Whether `fresh` blocks may be taken of `available`. Beside others a watermark stays free, so that they can grow;
    a lone sequence may take all."""
    return fresh + (watermark if others else 0) <= available
