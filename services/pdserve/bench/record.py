"""What a client saw of one request. Times are seconds from the beginning of the run.

A request's clock starts when it was meant to be sent, so that a late send counts against the answer and cannot hide a
stall (no coordinated omission). A gap is between two tokens: tokens of one message came at one time, so a message of k
tokens is the gap before it and k - 1 gaps of zero; what one read from a socket brings is one message.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdserve.client import Stages
from pdserve.core.slo import Outcome, SloTargets, Verdict, judge
from pdserve.simulator.workload import Arrival


@dataclass(frozen=True, slots=True)
class Told:
    """What the server says that an answer took. Stages and replays are a pdserve router's."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    stages: Stages | None = None
    replays: int = 0


@dataclass(slots=True)
class Record:
    """One request, filled in by whoever sends it. `clock` gives seconds from the beginning of the run.

    `at` is when it was to be sent, `sent` when it was. `stamps` are when tokens came and how many at once; `ids` are
    these tokens where the server tells them. `error` is "CODE: what it said"; None after a whole answer.
    """

    number: int
    arrival: Arrival
    at: float
    clock: Callable[[], float]
    sent: float | None = None
    stamps: list[tuple[float, int]] = field(default_factory=list)
    ids: array[int] = field(default_factory=lambda: array("I"))
    ended: float = 0.0
    told: Told | None = None
    error: str | None = None

    def sending(self) -> None:
        """It leaves now."""
        self.sent = self.clock()

    def take(self, count: int, ids: Sequence[int] = (), now: float | None = None) -> None:
        """`count` tokens are here; `now` where they came earlier than this call."""
        if count:
            self.stamps.append((self.clock() if now is None else now, count))
            self.ids.extend(ids)

    @property
    def lateness(self) -> float | None:
        """From when it was to be sent until it was; None where it never was."""
        return None if self.sent is None else max(0.0, self.sent - self.at)

    @property
    def tokens(self) -> int:
        """Tokens of the answer that were seen to come."""
        return sum(count for _, count in self.stamps)

    @property
    def output(self) -> int:
        """Tokens of the answer, by the server's count where it tells one."""
        return self.told.completion_tokens if self.told else self.tokens

    @property
    def ttft(self) -> float | None:
        """None where no token came."""
        return self.stamps[0][0] - self.at if self.stamps else None

    @property
    def gaps(self) -> list[float]:
        """Between each two neighbouring tokens."""
        found, last = list[float](), None
        for now, count in self.stamps:
            if last is not None:
                found.append(now - last)
            found.extend([0.0] * (count - 1))
            last = now
        return found

    @property
    def tpot(self) -> float | None:
        """The mean gap; None for less than two tokens."""
        gaps = self.gaps
        return sum(gaps) / len(gaps) if gaps else None

    @property
    def e2e(self) -> float:
        """Until its last token, or its error."""
        return (self.stamps[-1][0] if self.stamps and self.error is None else self.ended) - self.at

    def verdict(self, targets: SloTargets) -> Verdict:
        """Whether the promise was kept; an error of any kind broke it."""
        outcome = Outcome.ANSWERED if self.error is None else Outcome.FAILED
        verdict = judge(outcome, self.e2e, self.ttft, self.gaps, targets)
        assert verdict is not None, "answered and failed requests always have one"
        return verdict

    def check(self) -> None:
        """Note as an error that the lengths are not those that were asked for."""
        asked = (self.arrival.prompt, self.arrival.output)
        got = (self.told.prompt_tokens if self.told else asked[0], self.output)
        if self.error is None and got != asked:
            said = f"{got[0]} prompt and {got[1]} answer tokens, where {asked[0]} and {asked[1]} were asked for"
            self.error = f"WRONG_LENGTH: {said}"
