"""What an engine process writes down for benchmarks: when its steps ran, and when hand-offs left and joined them."""

from __future__ import annotations

import time
from collections.abc import Sequence
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

    `computed`: by ticket, when the newest step that it had part in ended its last layer, before tokens are sampled.
    `joined`: when the first one began.
    """

    steps: list[StepRecord] = []
    computed: dict[str, int] = {}
    joined: dict[str, int] = {}
    transfers: list[TransferRecord] = []
    forward: int = 0

    def forward_done(self) -> None:
        """The last layer of the step that runs is computed."""
        self.forward = time.monotonic_ns()

    def step(self, began: int, ended: int, tickets: Sequence[str]) -> None:
        """A step ran these tickets."""
        self.steps.append(StepRecord(began, ended, len(tickets)))
        self.computed.update(dict.fromkeys(tickets, self.forward))
        for ticket in tickets:
            self.joined.setdefault(ticket, began)

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.encode(self))
