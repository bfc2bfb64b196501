"""The books of what is being sent and received. One lock guards them all; it is held for bookkeeping, never for I/O.

A link's thread marks an attempt busy while it copies from or to its pages. Ending an attempt fences it at once, and
what is due then (an event to the engine loop) is done as soon as nothing touches the pages: now, or by the thread that
is copying when it is through. So nobody waits for a thread that is stuck in a receive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from pdserve.core.ticket import Landing

Due = Callable[[], None]


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt:
    """One attempt at a ticket, on one side. `slots` is the page slot of each prompt token, int64 [tokens]."""

    ticket: str
    attempt: int
    peer: str
    slots: torch.Tensor
    busy: bool = False  # a link's thread is copying from or to its pages
    over: bool = False
    due: Due | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Outgoing(Attempt):
    """Per layer: how many tokens are computed and how many were announced, from the prompt's start."""

    end: int
    computed: list[int]
    sent: list[int]
    events: list[torch.cuda.Event | None]
    granted: bool = False
    held: int = 0  # leading tokens that the peer has, once granted
    tells_grant: bool = False  # whether the engine loop is to hear of the grant
    tells_landed: bool = False  # whether it is still to hear that all tokens have landed
    unseen: int = 0  # bytes computed since the sender was last woken for it
    frames: int = 0
    kv_bytes: int = 0
    in_flight: int = 0  # bytes that were announced and have not landed
    first_token: int | None = None
    committed: bool = False
    began: float = 0.0  # when its first frame was announced, and when everything was computed; monotonic, 0: not yet
    computed_at: float = 0.0


@dataclass(slots=True, eq=False, kw_only=True)
class Incoming(Attempt):
    """`after` has completed when the pages' last reader is through with them."""

    landing: Landing
    after: torch.cuda.Event | None
    kv_bytes: int = 0


A = TypeVar("A", bound=Attempt)


@dataclass(slots=True)
class Book(Generic[A]):
    """The attempts of one side, by ticket. Every method is called with the lock held."""

    by_ticket: dict[str, A] = field(default_factory=dict)
    left: Callable[[], None] = lambda: None  # called when an attempt is out of the books

    def get(self, ticket: str) -> A | None:
        """The live attempt at a ticket, or one that is over but still busy."""
        return self.by_ticket.get(ticket)

    def live(self, ticket: str, attempt: int, peer: str) -> A | None:
        """This very attempt, unless it is over."""
        found = self.by_ticket.get(ticket)
        return found if found and (found.attempt, found.peer, found.over) == (attempt, peer, False) else None

    def of(self, peer: str) -> list[A]:
        """All live attempts with a peer."""
        return [attempt for attempt in self.by_ticket.values() if attempt.peer == peer and not attempt.over]

    def add(self, attempt: A) -> None:
        self.by_ticket[attempt.ticket] = attempt

    def end(self, attempt: A, due: Due) -> None:
        """Fence an attempt; `due` is called, with the lock held, once its pages are quiet. The last word wins."""
        attempt.over, attempt.due = True, due
        if not attempt.busy:
            self._release(attempt)

    def leave(self, attempt: A) -> None:
        """A thread is through with the pages that it marked busy."""
        attempt.busy = False
        if attempt.over:
            self._release(attempt)

    def _release(self, attempt: A) -> None:
        del self.by_ticket[attempt.ticket]
        self.left()
        due, attempt.due = attempt.due, None
        if due is not None:
            due()
