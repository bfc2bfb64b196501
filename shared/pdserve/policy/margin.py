"""How much longer waiting takes than was predicted, learned from what became of predictions.

Under overload the door lets in whatever is predicted to be just in time. If waiting then takes a tenth longer than was
predicted, not a tenth of the requests is late but all of them, each after it was paid for. So predictions are stretched
until most come true: by a quantile of (what was waited) / (what was to be waited), followed step by step on a
logarithmic scale, up fast and down slowly in the ratio that makes it a quantile (stochastic approximation: Robbins and
Monro, 1951).

Only what others add is stretched. What a fleet with nobody else in it would take is not, and so nobody is refused where
there is no load, however far off predictions were.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

QUANTILE = 0.9  # of the predictions, once stretched, come true
_RATE = 0.1  # of a step, in the logarithm: one that did not come true makes up for nine that did
MOST = 8.0  # times; where predictions are as wrong as that, something else is
_PART = 0.2  # of a prediction that others must make up, before it says something about them


@dataclass(slots=True)
class Margin:
    """Of one kind of prediction. `factor` is what the part that others add is multiplied by, 1 or more."""

    factor: float = 1.0

    def stretched(self, alone: float, predicted: float) -> float:
        """What to expect where `predicted` was, and `alone` with nobody else there; seconds."""
        return predicted + (self.factor - 1.0) * max(0.0, predicted - alone)

    def observe(self, alone: float, predicted: float, actual: float) -> None:
        """What was `predicted`, not stretched, came to be `actual`."""
        others = predicted - alone
        if others < _PART * predicted:
            return
        kept = actual - alone <= self.factor * others
        step = -_RATE * (1.0 - QUANTILE) if kept else _RATE * QUANTILE
        self.factor = min(MOST, max(1.0, self.factor * math.exp(step)))


@dataclass(slots=True)
class Margins:
    """A model's: of times to the first token, and of gaps."""

    ttft: Margin = field(default_factory=Margin)
    gap: Margin = field(default_factory=Margin)
