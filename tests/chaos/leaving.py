"""The router's part of moving a running sequence from one decode engine to another, played against engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pdserve.core.sequence import EndReason
from pdserve.engine.outputs import Ended, TokenOut
from pdserve.worker import messages as m
from tests.chaos.engines import Died, Event

if TYPE_CHECKING:
    from tests.chaos.lifecycles import Try


class Leaving:
    """The moves of one try, one at a time. The old ticket is followed until the new one has everything.

    `places` is where the try has tickets on decode engines that have not ended.
    """

    def __init__(self, run: Try, choose: Callable[[list[str]], str]) -> None:
        self.wanted = False
        self.places: dict[str, str] = {}
        self._run, self._choose = run, choose
        self._new = ""  # the ticket that is to take over; empty: nothing moves
        self._asked = False  # the old engine has stopped the sequence, and the new ticket is rearmed
        self._number = 0

    def consider(self) -> None:
        """Begin a move that is wanted, once the answer runs and all of it so far was shown."""
        run, life = self._run, self._run.life
        others = [name for name in run.alive("decode") if name != run.decode.name]
        ready = run.told and run.told[-1] + 1 == len(life.request.tokens) + life.known < self._longest
        if not (self.wanted and ready and others) or self._new or run.ended is not None or run.cancelled:
            return
        self.wanted, self._asked = False, False
        self._number += 1
        life.seen["moves"] += 1
        self._new = f"{run.ticket}-{self._number}"
        run.fabric.inboxes[self._new] = run.inbox
        self.places[self._new] = place = self._choose(others)
        spec = life.request.spec(life.known - 1, life.max_tokens, life.time_remaining)
        run.fabric[place].send(m.Reserve(self._new, 1, spec, run.decode.name))
        run.decode.send(m.HandOff(run.followed, self._new, 1, place, len(spec.token_ids)))

    @property
    def _longest(self) -> int:
        return len(self._run.life.request.tokens) + self._run.life.max_tokens

    def take(self, name: str, event: Event) -> bool:
        """Take in what a decode engine said. False: it is no news of a move, or not only that."""
        run = self._run
        if run.fabric[name].settings.role != "decode":
            return False
        if isinstance(event, Died):
            gone = [ticket for ticket, place in self.places.items() if place == name]
            for ticket in gone:
                del self.places[ticket]
            if run.followed in gone or self._new in gone:
                self._give_up()
            return run.followed not in gone
        if isinstance(event, Ended):
            self.places.pop(event.ticket, None)
        if event.ticket == run.followed:
            return self._take_followed(event)
        if event.ticket == self._new:
            self._take_new(event)
        elif isinstance(event, TokenOut):  # of one that was left behind
            run.life.show(event.position, event.token)
        return True

    def close(self) -> None:
        """The try is over."""
        for number in range(1, self._number + 1):
            del self._run.fabric.inboxes[f"{self._run.ticket}-{number}"]

    def _take_followed(self, event: Event) -> bool:
        run = self._run
        match event:
            case m.Detached(_, new, tokens):
                if new == self._new:
                    assert tokens == run.told[-1] + 1
                    self._asked = True
                    life = run.life
                    spec = life.request.spec(life.known - 1, life.max_tokens, life.time_remaining)
                    assert len(spec.token_ids) == tokens - 1
                    run.fabric[self.places[new]].send(m.Rearm(new, 2, spec, run.decode.name))
            case m.HandOffFailed(_, new, _):
                if new == self._new:
                    self._give_up()
            case m.TicketReady() if run.followed != run.ticket:
                pass  # as was known from the old one's end
            case Ended(_, EndReason.HANDED_OFF) if self._new and self._asked:
                self._switch()
            case Ended():
                self._give_up()
                return False
            case _:
                return False
        return True

    def _take_new(self, event: Event) -> None:
        match event:
            case m.TicketReady():
                self._switch()
            case m.AttemptFailed(_, attempt, _):
                if attempt == (2 if self._asked else 1):
                    self._give_up()
            case Ended():
                self._give_up()
            case TokenOut():
                raise AssertionError(f"{event} before it was ready")

    def _switch(self) -> None:
        """The new ticket is the one that counts."""
        run, old = self._run, self._run.followed
        run.life.seen["moved"] += 1
        self._cancel(old)  # where it has not ended by itself
        run.follow(self._new, run.fabric[self.places[self._new]])
        if run.cancelled:
            self._cancel(self._new)
        self._new = ""

    def _give_up(self) -> None:
        """The old engine goes on with it, if it has it."""
        if self._new:
            new, self._new = self._new, ""
            self._run.decode.send(m.CallOff(self._run.followed, new, "given up"))
            self._cancel(new)

    def _cancel(self, ticket: str) -> None:
        if ticket in self.places:
            self._run.fabric[self.places[ticket]].send(m.CancelTicket(ticket))
