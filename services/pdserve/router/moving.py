"""Moving a running sequence from a decode worker that drains to another one, with its KV.

Two tickets, one after the other: while the old one decodes on, the new one is reserved elsewhere and gets what has KV
already. Then the old worker detaches the sequence and says how many tokens it has; the new ticket is rearmed with those
and gets the rest. From the moment when it is READY it is the one that is followed. Until then nothing is lost by a
failure: the sequence goes on where it is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog

from pdserve.core.sequence import EndReason
from pdserve.policy.draining import HandOff
from pdserve.router.events import AttemptFailed, Draining, Ended, Event, Lost, Ready, Rearmed
from pdserve.router.ticket import Ticket
from pdserve.telemetry import names

if TYPE_CHECKING:
    from pdserve.router.request import RequestRun

log = structlog.get_logger(__name__)

PATIENCE = 5.0  # seconds for the KV of a few tokens, while the answer stands still


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a move came to nothing."""

    outcome: HandOff
    reason: str


class Move:
    """One try at moving the sequence of the ticket `old`, until the loop's time `until`. The caller hands it events,
    looks at `through` and `problem` after each, and must `close` it unless it is through.

    `gone`: the old worker has nothing to go on with any more, so that a problem means a replay.
    """

    def __init__(self, run: RequestRun, old: Ticket, until: float, reason: str) -> None:
        self.new: Ticket | None = None
        self.through = False
        self.problem: Problem | None = None
        self.gone = False
        self.draining: Draining | None = None  # the new worker is going to stop, too
        self._run, self._old = run, old
        self._asked = False  # the old worker has stopped the sequence, and the new ticket is rearmed
        self._began = time.time_ns()
        decode = old.assignment.decode
        assert decode is not None
        self._from = decode
        log.info("handing_off", ticket=old.id, worker=decode.worker_id, reason=reason)
        old.place(lambda: run.place_move(decode, until))

    def placed(self, problem: str) -> None:
        """Another decode worker was found, or none was: reserve there, and have the old one send."""
        assignment = self._old.take_placed()
        if assignment is None:
            self._fail(HandOff.NO_ROOM, problem)
            return
        spec = self._run.spec()
        spec = replace(spec, token_ids=spec.token_ids[:-1])  # the last one's KV may not be there yet
        self.new = Ticket(assignment, spec, self._run.ticket_name(), self._old)
        self.new.open()
        self._old.hand_off(self.new, len(spec.token_ids))

    def detached(self, new_ticket: str, tokens: int) -> None:
        """The old worker has stopped the sequence."""
        if self.new is None or self.new.id != new_ticket or self._asked:
            return
        spec = self._run.spec()
        if len(spec.token_ids) != tokens:
            self._fail(HandOff.FAILED, f"it has {tokens} tokens, and {len(spec.token_ids)} were told")
            return
        self._asked = True
        self.new.rearm(replace(spec, token_ids=spec.token_ids[:-1]))

    def stays(self, new_ticket: str, reason: str) -> None:
        """The old worker goes on with it."""
        if self.new is not None and self.new.id == new_ticket:
            self._fail(HandOff.FAILED, reason)

    def left(self) -> bool:
        """The old worker has nothing more to tell. Whether the new one may have what it needs nevertheless."""
        self.gone = True
        return self._asked and self.problem is None

    def take(self, event: Event) -> None:
        """Take in what happened to the new ticket."""
        new = self.new
        assert new is not None
        match event:
            case Rearmed(attempt) if attempt == new.attempt:
                new.expect(PATIENCE, "the rest of the KV")
            case Ready():
                new.expect(None)
                self.through = True
                self._tell(None)
            case AttemptFailed(attempt, reason) if attempt == new.attempt:
                self._fail(HandOff.FAILED, reason)
            case Ended(reason, detail):
                refused = reason in (EndReason.NO_CAPACITY, EndReason.DRAINING)
                self._fail(HandOff.REFUSED if refused else HandOff.FAILED, f"{reason}: {detail}")
            case Lost(reason):
                self._fail(HandOff.FAILED, reason)
            case Draining():
                self.draining = event

    def close(self) -> None:
        """Leave nothing behind but the old ticket. May be called again."""
        self._old.stop_placing()
        if self.new is not None:
            self.new.close()

    def _fail(self, outcome: HandOff, reason: str) -> None:
        if self.problem is not None:
            return
        self.problem = Problem(outcome, reason)
        if self.new is not None:
            if not self.gone:
                self._old.call_off(self.new)
            if self.new.assignment.decode is not None:
                self._run.avoid(self.new.assignment.decode)
        self.close()
        self._tell(self.problem)

    def _tell(self, problem: Problem | None) -> None:
        """Log, count and trace what came of it."""
        run, outcome = self._run, problem.outcome if problem else HandOff.MOVED
        to = self.new.assignment.decode if self.new is not None else None
        told = {"worker": self._from.worker_id, "to": to.worker_id if to else "", "tokens": run.answer.num_tokens}
        if problem is None:
            log.info("handed_off", ticket=self._old.id, **told)
        else:
            log.warning("hand_off_failed", ticket=self._old.id, outcome=str(outcome), reason=problem.reason, **told)
        run.measure.handed_off(outcome)
        attributes: dict[str, str | int] = {names.WORKER: self._from.worker_id, names.TOKENS: run.answer.num_tokens}
        if to is not None:
            attributes[names.DECODE_WORKER] = to.worker_id
        run.trace_move(self._began, attributes, problem.reason if problem else "")
