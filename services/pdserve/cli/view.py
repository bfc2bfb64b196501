"""One look at a fleet, and what changed since the one before: the values behind `pdserve top`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pdserve.client import FleetWorker, Stats


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """What one worker did between two looks: the share of the time that its engine was in steps, tokens a second
    (computed by a prefill worker, sampled by others), bytes a second to each peer, and of the prompt tokens that it
    looked up in its own cache the share that was there (None: none was)."""

    busy: float
    tokens: float
    links: Mapping[str, float]
    hits: float | None


@dataclass(frozen=True, slots=True)
class View:
    """One look. `at` is Unix time in seconds. `rates`, by worker id, are since the look before; a first look has none.
    `problem` says why there is nothing newer."""

    target: str
    at: float
    fleet: tuple[FleetWorker, ...]
    stats: Stats
    rates: Mapping[str, WorkerRates] = field(default_factory=dict)
    problem: str = ""

    @classmethod
    def after(cls, before: View | None, target: str, at: float, fleet: tuple[FleetWorker, ...], stats: Stats) -> View:
        """A look, and what changed since the one before it."""
        seconds = at - before.at if before else 0.0
        rates = worker_rates(before.fleet, fleet, seconds) if before and seconds > 0 else {}
        return cls(target, at, fleet, stats, rates)


def state_of(worker: FleetWorker) -> str:
    """A worker's state in a word: up, draining, lost (it was there), or unreachable (it has not answered yet)."""
    if not worker.connected:
        return "lost" if worker.worker_id else "unreachable"
    return "draining" if worker.draining else "up"


def waiting(view: View, problem: str) -> View:
    """The last look that there was, and why there is no newer one."""
    return replace(view, problem=problem)


def worker_rates(before: Sequence[FleetWorker], now: Sequence[FleetWorker], seconds: float) -> dict[str, WorkerRates]:
    """By worker id, for those that were the same processes at both looks."""
    known = {worker.incarnation: worker for worker in before if worker.connected}
    rates = {}
    for worker in now:
        old = known.get(worker.incarnation)
        if old is None or not worker.connected:
            continue
        counted = "computed_tokens" if worker.role == "prefill" else "sampled_tokens"
        queries = worker.prefix_queries - old.prefix_queries
        sent = {link.peer: link.bytes_sent for link in old.links}
        rates[worker.worker_id] = WorkerRates(
            busy=min(1.0, (worker.busy_seconds - old.busy_seconds) / seconds),
            tokens=(getattr(worker, counted) - getattr(old, counted)) / seconds,
            # Less than before: the link was closed and made again, from 0.
            links={
                link.peer: (link.bytes_sent - min(link.bytes_sent, sent.get(link.peer, 0))) / seconds
                for link in worker.links
            },
            hits=(worker.prefix_hits - old.prefix_hits) / queries if queries else None,
        )
    return rates
