"""Who measures requests: each is told the same, once, from the one place where tokens are timed (`stages.Timeline`)."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.slo import Outcome, Verdict
from pdserve.policy.draining import HandOff
from pdserve.policy.fleet import Target
from pdserve.policy.limits import Limit
from pdserve.policy.routing import Decision
from pdserve.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that is over. `code` is the gRPC status code's name; `ttft` is in seconds, None where no token came.

    `usage` is as far as it was known by then, its stages included. `verdict` is None where the request says nothing
    about the deployment (see `core.slo.judge`). `reason` is "stop" or "length" where it was answered.
    """

    model: str
    outcome: Outcome
    code: str
    seconds: float
    ttft: float | None
    usage: inference_pb2.Usage
    verdict: Verdict | None
    reason: str = ""
    operation: str = ""
    gaps_seconds: float = 0.0  # from the first token to the last


class Meter:
    """Calls come on the event loop, in the middle of serving: they must be quick, and not raise. Times are seconds.

    What a subclass leaves out is not of interest to it.
    """

    def started(self, model: str) -> None:
        """A request for a served model is taken in. `ended` follows, however it ends."""

    def first_token(self, model: str, seconds: float) -> None:
        """From arrival to the first token."""

    def gap(self, model: str, seconds: float) -> None:
        """Between two tokens of one answer: every single one."""

    def queued(self, model: str, seconds: float) -> None:
        """A try of a request was placed after waiting so long for a worker."""

    def decided(self, model: str, decision: Decision) -> None:
        """A request is to go, or to wait, where it was not told so before."""

    def predicted(self, model: str, predicted: float, actual: float) -> None:
        """A first token came: from the decision to it, as the router had predicted and as it was. Only where the
        workers had told how fast they are."""

    def refused(self, model: str) -> None:
        """A worker had no room for a request after all, so it is placed again."""

    def turned_away(self, model: str, why: Limit | Target) -> None:
        """A request was refused at the door, before anything was spent on it."""

    def rearmed(self, model: str) -> None:
        """A reservation goes on with another prefill worker."""

    def handed_off(self, model: str, outcome: HandOff) -> None:
        """What became of a sequence on a decode worker that drains: at each try at moving it, and where it stays."""

    def hand_off_gap(self, model: str, seconds: float) -> None:
        """From the latest token on one decode worker to the first on the one that took over."""

    def rejected(self, code: str) -> None:
        """A request ended, with that status code, before it was known which served model it is for."""

    def ended(self, ended: Ended) -> None:
        """The request is over."""
