"""Whether a prefill worker takes KV of a prompt's beginning from the decode worker, or computes it.

In a conversation the decode worker holds the earlier turns, its own answers included, and the prefill worker perhaps
not. Whatever is pulled needs no computing and is not sent back; but the link is shared, and computing may be faster.
"""

from __future__ import annotations

from dataclasses import dataclass

# Pulling must beat computing by this much: both are estimates.
MARGIN = 0.8
# A pull that takes this many times what computing would have taken is given up.
PATIENCE = 2.0
PATIENCE_MIN, PATIENCE_MAX = 0.05, 5.0  # seconds


@dataclass(frozen=True, slots=True)
class PullDecision:
    """`patience`, in seconds, is how long to wait before computing after all."""

    pull: bool
    reason: str
    patience: float = 0.0


def choose_pull(
    *, tokens: int, size: int, bytes_per_second: float, round_trip: float, tokens_per_second: float
) -> PullDecision:
    """Decide for `tokens` tokens that are missing here, of `size` bytes on the wire. Rates as measured; 0: unknown,
    and what is unknown is not pulled: computing always works, and measures."""
    if tokens <= 0:
        return PullDecision(False, "nothing is missing here")
    if bytes_per_second <= 0 or tokens_per_second <= 0:
        return PullDecision(False, "the link or the prefill rate is not measured yet")
    pull, compute = 2 * round_trip + size / bytes_per_second, tokens / tokens_per_second
    reason = f"{1e3 * pull:.1f} ms to pull {tokens} tokens, {1e3 * compute:.1f} ms to compute"
    if pull >= MARGIN * compute:
        return PullDecision(False, reason)
    return PullDecision(True, reason, min(PATIENCE_MAX, max(PATIENCE_MIN, PATIENCE * compute)))
