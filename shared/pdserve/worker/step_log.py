"""What an engine process writes down for benchmarks: when its steps ran, and when hand-offs left and joined them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """One engine step, in monotonic nanoseconds, and how many sequences it ran."""

    began: int
    ended: int
    running: int


class TransferRecord(msgspec.Struct, frozen=True, array_like=True):
    """One committed transfer, as its sender saw it; see messages.SendCommitted."""

    ticket: str
    kv_bytes: int
    seconds: float
    exposed: float


class StepLog(msgspec.Struct):
    """Times are monotonic nanoseconds, which all processes of a machine share.

    `computed`: by ticket, when the last layer of its newest chunk had its KV. `joined`: when the first step that it had
    part in began.
    """

    steps: list[StepRecord] = []
    computed: dict[str, int] = {}
    joined: dict[str, int] = {}
    transfers: list[TransferRecord] = []

    def layer_done(self, progress: Iterable[tuple[str, int]], now: int) -> None:
        """The last layer's KV exists for a chunk of these tickets."""
        self.computed.update((ticket, now) for ticket, _ in progress)

    def step(self, began: int, ended: int, tickets: Sequence[str]) -> None:
        """A step ran these tickets."""
        self.steps.append(StepRecord(began, ended, len(tickets)))
        for ticket in tickets:
            self.joined.setdefault(ticket, began)

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.encode(self))
