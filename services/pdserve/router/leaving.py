"""Whether and when a try's sequence leaves a decode worker that is going to stop, and who is followed from then on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from pdserve.core.sequence import EndReason
from pdserve.policy.draining import HandOff, decide_leaving
from pdserve.router.events import Detached, Draining, Ended, Event, HandOffFailed, Lost, Placed
from pdserve.router.moving import Move
from pdserve.router.ticket import Ticket

if TYPE_CHECKING:
    from pdserve.router.request import RequestRun

log = structlog.get_logger(__name__)

MOVES = 3  # tries at moving a sequence off a worker that drains; from then on it stays


class Leaving:
    """What a follower knows of moves. `vain`: why the sequence is nowhere any more; empty while it is somewhere."""

    def __init__(self, run: RequestRun) -> None:
        self.vain = ""
        self._run = run
        self._stops_at: float | None = None  # when the decode worker is going to stop, the loop's time
        self._tries = 0
        self._move: Move | None = None
        self._moved = False  # since the latest token
        self._first, self._began = 0, 0  # this worker's first token: its position, 0 before it, and its stamp
        self._latest = 0  # the position of the latest one
        self._tickets: list[Ticket] = []  # those that took over

    @property
    def drains(self) -> bool:
        """The decode worker is going to stop, and the sequence has not left it."""
        return self._stops_at is not None

    def consider(self, ticket: Ticket) -> None:
        """Have the sequence of `ticket`, which decodes, moved where the policy says so. May be called again."""
        run = self._run
        if self._stops_at is None or self._move is not None or self._tries >= MOVES:
            return
        grace = self._stops_at - asyncio.get_running_loop().time()
        if grace <= 0:
            return
        decision = decide_leaving(run.leave_rule, run.remaining, self._gap(), grace)
        if decision.leaves:
            self._tries += 1
            self._move = Move(run, ticket, self._stops_at, decision.reason)
        else:
            self._tries = MOVES
            run.measure.handed_off(HandOff.STAYED)
            log.info("stays", ticket=ticket.id, reason=decision.reason)

    def take(self, event: Event) -> bool:
        """Take in what happened to the ticket that is followed. Whether it was about leaving, and nobody else's."""
        move = self._move
        match event:
            case Draining(seconds):
                self._stops_at, self._tries = asyncio.get_running_loop().time() + seconds, 0
            case Detached() | HandOffFailed() if move is None:
                pass  # of a move that was called off
            case _ if move is None:
                return False
            case Placed(reason):
                move.placed(reason)
            case Detached(new_ticket, tokens):
                move.detached(new_ticket, tokens)
            case HandOffFailed(new_ticket, reason):
                move.stays(new_ticket, reason)
            case Ended(EndReason.HANDED_OFF) | Lost():
                if not move.left():
                    return False
            case _:
                return False
        self._settle()
        return True

    def leads_to(self, ticket: Ticket) -> bool:
        """Whether `ticket` is the one that is to take over."""
        return self._move is not None and self._move.new is ticket

    def take_new(self, event: Event) -> bool:
        """Take in what happened to the ticket that is to take over. Whether it is the one to follow from now on; the
        old one ends by itself."""
        move = self._move
        assert move is not None and move.new is not None
        move.take(event)
        if not move.through:
            self._settle()
            return False
        self._tickets.append(move.new)
        self._move, self._stops_at, self._moved, self._first = None, None, True, 0
        self._latest = 0
        if move.draining is not None:
            self.take(move.draining)
        return True

    def token(self, position: int) -> None:
        """The token at `position` was handed over, and timed."""
        timeline, self._latest = self._run.timeline, position
        if not self._first:
            self._first, self._began = position, timeline.latest
        if self._moved:
            self._moved = False
            self._run.measure.hand_off_gap(timeline.gaps[-1])

    async def end(self) -> None:
        """Let go of all tickets but the try's own."""
        if self._move is not None:
            self._move.close()
        for ticket in self._tickets:
            await ticket.leave()

    def _gap(self) -> float:
        """Mean seconds between tokens on this worker; 0: not known."""
        made = self._latest - self._first
        return (self._run.timeline.latest - self._began) / 1e9 / made if made > 0 else 0.0

    def _settle(self) -> None:
        """Stay, or try another worker, where a move came to nothing."""
        move = self._move
        if move is None or move.problem is None:
            return
        self._move = None
        if move.gone:
            self.vain = f"handed off in vain: {move.problem.reason}"
        if move.problem.outcome is HandOff.NO_ROOM:
            self._tries = MOVES
