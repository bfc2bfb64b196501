"""One pass over the queue of a model: who goes now, who waits for whom, and who holds up those behind.

Who waits for room (WAIT) is overtaken by nobody, so that a big request does not starve. Who waits for the prefill
worker that will be through soonest (DEFER) is overtaken by those that go elsewhere: they take nothing from it. Its
prompt counts as that worker's work meanwhile, so that those behind it don't all wait for the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import TypeVar

from pdserve.policy.fleet import FleetView, PlacementRequest, WorkerView
from pdserve.policy.routing import Decision, Kind

T = TypeVar("T", bound=Hashable)

LOOKS = 16  # requests that wait for a prefill worker in one pass; what is behind them waits for the next one


@dataclass(frozen=True, slots=True)
class Deferral:
    """Somebody waits for the prefill worker `worker_id`, which was going to take more before `until`; `tokens` and
    `squares` are what it will have to compute then."""

    worker_id: str
    until: float
    tokens: int
    squares: int

    def stands(self, view: FleetView, now: float) -> bool:
        """Whether asking again would only give the same answer."""
        worker = view.index.get(self.worker_id)
        return worker is not None and worker.usable and not worker.accepts_prompt and now < self.until


def plan_pass(
    waiting: Iterable[T],
    view_of: Callable[[], FleetView],
    request_of: Callable[[T], PlacementRequest],
    choose: Callable[[T, FleetView, PlacementRequest], Decision],
    looks: int = LOOKS,
    *,
    deferred: MutableMapping[T, Deferral] | None = None,
    now: float = 0.0,
) -> Generator[tuple[T, Decision], None, None]:
    """Decide for `waiting` in its order, each with what is to become of it. Ends behind the first that has to WAIT, and
    behind `looks` that DEFER.

    The caller acts on a decision before it asks for the next: it places, accounts for it, and takes whom it placed or
    failed off the queue (so `waiting` is a copy, or reads lazily and stands it). Where it could not place after all, it
    stops here. `view_of` gives the view as it is by then; the same object as long as nothing changed.

    `deferred` is kept by the caller from one pass to the next, `now` is in seconds: who is in there is passed over,
    without a word, as long as there is nothing new for it.
    """
    before = dict(deferred) if deferred else {}
    kept: MutableMapping[T, Deferral] = {} if deferred is None else deferred
    kept.clear()
    claims: dict[str, tuple[int, int]] = {}
    view = view_of()
    current, counted = view, 0
    for item in waiting:
        latest = view_of()
        if latest is not current:
            view, current, counted = latest, latest, 0
        standing = before.get(item)
        if standing is None or not standing.stands(current, now):
            if counted != len(kept):  # since the view was made, somebody decided to wait
                view, counted = _with(current, claims), len(kept)
            request = request_of(item)
            decision = choose(item, view, request)
            yield item, decision
            if decision.kind is Kind.WAIT:
                return
            if decision.kind is not Kind.DEFER or decision.prefill is None:
                continue
            queue = decision.options[0].queue if decision.options else 0.0
            standing = Deferral(decision.prefill, now + queue, *work(request, view.index[decision.prefill]))
        kept[item] = standing
        tokens, squares = claims.get(standing.worker_id, (0, 0))
        claims[standing.worker_id] = tokens + standing.tokens, squares + standing.squares
        if len(kept) >= looks:
            return


def _with(view: FleetView, claims: dict[str, tuple[int, int]]) -> FleetView:
    for worker_id, (tokens, squares) in claims.items():
        if worker_id in view.index:
            view = view.claimed(worker_id, tokens, squares)
    return view


def work(request: PlacementRequest, worker: WorkerView) -> tuple[int, int]:
    """What `worker` has to compute for `request`: tokens, and their squares as in `policy.estimate`."""
    held = request.held_tokens(worker)
    return request.tokens - held, request.tokens**2 - held**2
