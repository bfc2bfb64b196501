"""A request on its way, and what a worker keeps of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.core.errors import ConfigError
from pdserve.core.slo import Outcome
from pdserve.simulator.workload import Arrival


@dataclass(slots=True, eq=False)
class Request:
    """One request through all its tries. Times are in seconds, -1 for what has not happened; `gaps` are (seconds, how
    many) between its tokens."""

    arrival: Arrival
    number: int
    hashes: list[bytes]
    produced: int = 0  # tokens that the client has
    first_at: float = -1.0
    last_at: float = -1.0
    done_at: float = -1.0
    dispatched_at: float = -1.0
    cached: int = 0  # tokens of the first prefill that were cached there, or fetched
    fetched: int = 0  # those of them that were fetched
    gaps: list[tuple[float, int]] = field(default_factory=list)
    tries: int = 0
    charged: int = 0  # to its tenant, for an answer that is not there yet
    outcome: Outcome | None = None
    rejected: bool = False  # for load; its outcome is FAILED

    @property
    def tokens(self) -> int:
        """What a worker is given: the prompt and every token shown."""
        return self.arrival.prompt + self.produced

    @property
    def remaining(self) -> int:
        return self.arrival.output - self.produced


@dataclass(slots=True, eq=False)
class Job:
    """A request on one worker: `blocks` are its pages, `computed` how many of its `length` tokens have KV in them.

    `goal` is how many are given: up to there it is prefill. `fetching` tokens after the computed ones are on their way.
    """

    request: Request
    goal: int
    length: int
    computed: int
    blocks: list[int]
    published: int
    decodes: bool
    fetching: int = 0
    began: float = -1.0  # when its first chunk did


def block_hashes(arrival: Arrival, block_size: int) -> list[bytes]:
    """Hashes of a prompt's full blocks of `block_size` tokens, from the ids that the workload gives.

    A block of ours that lies within one of the workload's is named by it and its place there, so blocks must divide.
    """
    if not arrival.block_ids:
        return []
    if arrival.block_tokens % block_size:
        raise ConfigError(f"blocks of {block_size} tokens don't divide the workload's of {arrival.block_tokens}")
    parts = arrival.block_tokens // block_size
    full = arrival.prompt // block_size
    ids: Sequence[int] = arrival.block_ids
    return [
        (ids[index // parts] * parts + index % parts).to_bytes(8, "little")
        for index in range(min(full, len(ids) * parts))
    ]
