"""Whether a request is taken in at all: one that would come too late is told so at once, before it costs anything.

It is judged by the load there will be when its prompt is through, not by the load of now. A decode worker that is full
now may have ended half its answers by then, and one that is empty may be promised to all who wait ahead; refusing by
the load of now makes fleets swing between refusing everybody and taking in too many (Mooncake, FAST 2025, section 6).

Nobody is refused on a guess. Only measured speeds count, only targets that somebody stated, and the request's deadline;
and only where a fleet with nobody else in it would have kept them. So a refusal always means that there is load, which
goes away: an estimate that is wrong can be corrected, because somebody is being served. What becomes of those who were
let in corrects it at once (`policy.margin`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pdserve.policy.disaggregation import Protect, Rules
from pdserve.policy.fleet import AIM, FleetView, PlacementRequest, Target
from pdserve.policy.forecast import Ahead, Forecast
from pdserve.policy.margin import Margins
from pdserve.policy.routing import DEFAULT_RULES

NO_MARGINS = Margins()
RETRY_MIN, RETRY_MAX = 0.1, 30.0  # seconds, bounds of what a refused request is told to wait
_IN_HAND = f" with {1 - AIM:.0%} in hand"
_STEPS = 12  # halvings of RETRY_MAX: to 10 ms


@dataclass(frozen=True, slots=True)
class Admission:
    """`missed` is what would not be kept; None: it is admitted. `ttft` and `gap` are predictions in seconds, None where
    there is nothing measured to predict from, without any margin; `idle_ttft` and `idle_gap` what they would be with
    nobody else there, and `joined_gap` what the gap would be if it were not held back for the sake of gaps.
    `retry_after`, in seconds, is when it would be kept again, if nothing else came."""

    reason: str
    missed: Target | None = None
    ttft: float | None = None
    gap: float | None = None
    retry_after: float = 0.0
    idle_ttft: float = 0.0
    idle_gap: float = 0.0
    joined_gap: float = 0.0

    def observe(self, margins: Margins, ttft: float) -> None:
        """What was predicted for one that was let in came to be: its first token took `ttft` seconds from here."""
        if self.ttft is not None:
            margins.ttft.observe(self.idle_ttft, self.ttft, ttft)

    def observe_gap(self, margins: Margins, gap: float, target: float) -> None:
        """And `gap` seconds lay between its tokens, at the percentile that `target` is for. Up to that, workers that
        compute prompts beside answers fill steps on purpose (`policy.batching`), which tells nothing of the load."""
        if self.gap is not None:
            margins.gap.observe(self.idle_gap, self.joined_gap, gap if gap > target else min(gap, self.joined_gap))

    @property
    def admitted(self) -> bool:
        return self.missed is None


def admit(
    view: FleetView,
    request: PlacementRequest,
    ahead: Ahead,
    rules: Rules = DEFAULT_RULES,
    *,
    time_left: float = math.inf,
    margins: Margins = NO_MARGINS,
) -> Admission:
    """Decide for one request at the door; `time_left` is the time to its deadline, in seconds. `margins` are the
    model's."""
    forecast = Forecast(view, request, ahead, rules)
    times = forecast.ttft()
    if times is None:
        return Admission("nothing is known yet of how fast prompts are computed")
    predicted, idle = times
    ttft = margins.ttft.stretched(idle, predicted)
    left = request.planned.ttft - request.waited if Target.TTFT in request.stated else math.inf
    gap, idle_gap, wait = _gap(forecast, request, ttft, left, rules, margins)
    joined = 0.0 if gap is None else forecast.gap(predicted)
    kept = "its targets would be kept, or none were stated"
    admitted = Admission(kept, None, predicted, gap, idle_ttft=idle, idle_gap=idle_gap, joined_gap=joined)
    misses: list[tuple[float, Target, str]] = []
    if idle <= time_left < ttft:
        said = f"its deadline is in {time_left:.3g} s, and the first token would come in {ttft:.3g} s, {idle:.3g} s"
        misses.append((ttft - time_left, Target.DEADLINE, said))
    if idle <= left < ttft:
        asked = f"{1e3 * request.targets.ttft:g} ms to the first token would not be kept{_IN_HAND}"
        misses.append((ttft - left, Target.TTFT, f"{asked}: it would come in {1e3 * ttft:.0f} ms, {1e3 * idle:.0f} ms"))
    if wait > 0 and gap is not None:
        asked = f"{1e3 * request.targets.itl:g} ms between tokens would not be kept{_IN_HAND}"
        stretched = margins.gap.stretched(idle_gap, gap)
        misses.append((wait, Target.ITL, f"{asked}: it would be {1e3 * stretched:.1f} ms, {1e3 * idle_gap:.1f} ms"))
    if not misses:
        return admitted
    _, missed, said = misses[0]
    retry_after = min(RETRY_MAX, max(RETRY_MIN, *(seconds for seconds, _, _ in misses)))
    said += f" with nobody else there; {ahead.count} requests wait ahead in the router"
    return replace(admitted, reason=said, missed=missed, retry_after=retry_after)


def _gap(
    forecast: Forecast, request: PlacementRequest, ttft: float, left: float, rules: Rules, margins: Margins
) -> tuple[float | None, float, float]:
    """What would lie between its tokens, and with nobody else there; and for how long that is above the target with its
    margin: 0 where it is not, or not stated.

    Where gaps are protected the router holds the request until some decode worker has room for its tokens in time, as
    long as the first one may still come: the load of that moment decides.
    """
    if not forecast.knows_gaps:
        return None, 0.0, 0.0
    idle, target = forecast.idle_gap, request.planned.itl

    def kept(seconds: float) -> bool:
        return margins.gap.stretched(idle, forecast.gap(seconds)) <= target

    moment = max(ttft, left) if rules.protect is Protect.ITL and left < math.inf else ttft
    gap = forecast.gap(moment)
    if Target.ITL not in request.stated or kept(moment) or idle > target:
        return gap, idle, 0.0
    least, most = 0.0, RETRY_MAX
    for _ in range(_STEPS):
        middle = (least + most) / 2
        least, most = (least, middle) if kept(moment + middle) else (middle, most)
    return gap, idle, most
