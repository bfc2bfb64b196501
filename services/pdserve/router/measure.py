"""One request, measured from its arrival to its end, and told to every meter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc

from pdserve.core.errors import InvalidRequest
from pdserve.core.slo import Outcome, SloTargets, judge
from pdserve.policy.draining import HandOff
from pdserve.policy.fleet import Target
from pdserve.policy.limits import Limit
from pdserve.policy.routing import Decision
from pdserve.router.decisions import DecisionLog
from pdserve.router.meter import Ended, Meter
from pdserve.router.stages import Timeline
from pdserve.v1 import inference_pb2

_ANSWERS = {inference_pb2.FINISH_REASON_STOP: "stop", inference_pb2.FINISH_REASON_LENGTH: "length"}
# What a client asked for in vain. The others are the deployment's: a full fleet is a promise that was not kept.
_CLIENTS_ERRORS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)


class Measure:
    """Made when the request arrives. The first of `answered`, `failed` and `cancelled` ends it; more change nothing."""

    def __init__(self, meters: Sequence[Meter], operation: str) -> None:
        self.timeline = Timeline(listener=self)
        self.decisions = DecisionLog(self._decided)
        self.usage = inference_pb2.Usage()
        self.workers: dict[str, None] = {}  # ids of all that it was placed on, in that order
        self.on_first_token: Callable[[float], None] | None = None  # told the seconds from arrival to it
        self._all = meters
        self._meters: Sequence[Meter] = ()  # who hears of it: all, from when its model is known until its end
        self._operation = operation
        self._model = ""
        self._targets: SloTargets | None = None
        self._limited = False
        self._over = False

    def started(self, model: str, targets: SloTargets) -> None:
        """It is for a served model, and was promised `targets`."""
        self._model, self._targets, self._meters = model, targets, self._all
        for meter in self._meters:
            meter.started(model)

    def first_token(self, seconds: float) -> None:
        if self.on_first_token is not None:
            self.on_first_token(seconds)
        for meter in self._meters:
            meter.first_token(self._model, seconds)
        placed = self.decisions.placed
        if placed is not None and placed.best is not None and placed.best.measured:
            took = self.timeline.arrived + self.timeline.offset + round(1e9 * seconds) - placed.last_ns
            if took >= 0:  # else it was placed anew since, and this token was not what that was about
                for meter in self._meters:
                    meter.predicted(self._model, placed.best.ttft, took / 1e9)

    def gap(self, seconds: float) -> None:
        for meter in self._meters:
            meter.gap(self._model, seconds)

    def queued(self, seconds: float) -> None:
        """It was placed after waiting so long for a worker."""
        for meter in self._meters:
            meter.queued(self._model, seconds)

    def refused(self) -> None:
        """A worker had no room for it after all."""
        for meter in self._meters:
            meter.refused(self._model)

    def turned_away(self, why: Limit | Target) -> None:
        """It was refused at the door. A tenant's own limit says nothing about the deployment."""
        self._limited = isinstance(why, Limit)
        for meter in self._meters:
            meter.turned_away(self._model, why)

    def rearmed(self) -> None:
        """Its reservation goes on with another prefill worker."""
        for meter in self._meters:
            meter.rearmed(self._model)

    def handed_off(self, outcome: HandOff) -> None:
        """What became of it on a decode worker that drains."""
        for meter in self._meters:
            meter.handed_off(self._model, outcome)

    def hand_off_gap(self, seconds: float) -> None:
        """It goes on at another decode worker, so long after its latest token."""
        for meter in self._meters:
            meter.hand_off_gap(self._model, seconds)

    def _decided(self, decision: Decision) -> None:
        for meter in self._meters:
            meter.decided(self._model, decision)

    def answered(self, finish: inference_pb2.Finish) -> None:
        self._end(Outcome.ANSWERED, grpc.StatusCode.OK, _ANSWERS.get(finish.reason, ""))

    def failed(self, code: grpc.StatusCode) -> None:
        """A deadline is the client's as much as ours: what was waited by then decides, as where a client cancels."""
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            outcome = Outcome.EXPIRED
        else:
            outcome = Outcome.REFUSED if self._limited or code in _CLIENTS_ERRORS else Outcome.FAILED
        self._end(outcome, code)

    def cancelled(self) -> None:
        self._end(Outcome.CANCELLED, grpc.StatusCode.CANCELLED)

    def _end(self, outcome: Outcome, code: grpc.StatusCode, reason: str = "") -> None:
        if self._over:
            return
        self._over = True
        if self._targets is None:
            for meter in self._all:
                meter.rejected(code.name)
            return
        timeline = self.timeline
        timeline.tell()
        seconds, ttft = timeline.waited, timeline.ttft
        self.usage.completion_tokens = timeline.tokens
        self.usage.stages.CopyFrom(timeline.told())
        ended = Ended(
            model=self._model,
            outcome=outcome,
            code=code.name,
            seconds=seconds,
            ttft=ttft,
            usage=self.usage,
            verdict=judge(outcome, seconds, ttft, timeline.gaps, self._targets, timeline.open_gap),
            reason=reason,
            operation=self._operation,
            gaps_seconds=sum(timeline.gaps),
        )
        for meter in self._meters:
            meter.ended(ended)
        self._meters = ()


def promised(slo: inference_pb2.SloTargets, defaults: SloTargets) -> SloTargets:
    """The targets of a request: its own where it names them. Raises InvalidRequest."""
    if not (slo.HasField("ttft_ms") or slo.HasField("itl_ms")):
        return defaults
    values = {}
    for field, default in (("ttft_ms", defaults.ttft), ("itl_ms", defaults.itl)):
        value = getattr(slo, field) / 1e3 if slo.HasField(field) else default  # type: ignore[arg-type]
        if not 0 < value < float("inf"):
            raise InvalidRequest(f"slo.{field}", f"must be above 0, got {value * 1e3:g}")
        values[field] = value
    return SloTargets(values["ttft_ms"], values["itl_ms"], defaults.itl_percentile)
