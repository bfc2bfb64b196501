"""One pass over the queue of a model: who goes now, who waits for whom, and who holds up those behind.

Who waits for room (WAIT) is overtaken by nobody, so that a big request does not starve. Who waits for the prefill
worker that will be through soonest (DEFER) is overtaken by those that go elsewhere: they take nothing from it. Its
prompt counts as that worker's work meanwhile, so that those behind it don't all wait for the same one.

Who waits since it insists on something (`Terms`) is overtaken by those that don't, by others', and by those of its own
that are content with less: one client's wish is nobody else's wait. The caller counts by how many, and the policy
bounds that (`PlacementRequest.overtaken`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from pdserve.policy.fairness import PromptWork
from pdserve.policy.fleet import FleetView, PlacementRequest, WorkerView
from pdserve.policy.routing import Decision, Kind

T = TypeVar("T", bound=Hashable)

# Requests that wait for a prefill worker in one pass; what is behind them waits for the next one. And as many that are
# asked in vain since they insist on something, at most some of one owner; from then on those that do are passed over.
LOOKS = 16
LOOKS_EACH = 2


class Terms(NamedTuple):
    """What a request insists on: a `gap` between tokens, in seconds, or no more than to go on where it is (0). Where
    one waits for that, whoever is behind it, of the same `owner`, and content with no longer gaps, waits with it."""

    owner: Hashable
    gap: float


@dataclass(frozen=True, slots=True)
class Deferral:
    """Somebody waits for the prefill worker `worker_id`, which was going to take more before `until`; `tokens` and
    `squares` are what it will have to compute then. `takers` are the workers that took prompts when it was decided."""

    worker_id: str
    until: float
    tokens: int
    squares: int
    takers: frozenset[str] = frozenset()

    def stands(self, view: FleetView, takers: frozenset[str], now: float) -> bool:
        """Whether asking again would only give the same answer; `takers` are those of `view`."""
        worker = view.index.get(self.worker_id)
        waits = worker is not None and worker.usable and not worker.accepts_prompt and now < self.until
        return waits and takers <= self.takers


def plan_pass(
    waiting: Iterable[T],
    view_of: Callable[[], FleetView],
    request_of: Callable[[T], PlacementRequest],
    choose: Callable[[T, FleetView, PlacementRequest], Decision],
    looks: int = LOOKS,
    *,
    terms_of: Callable[[T], Terms | None] = lambda item: None,
    deferred: MutableMapping[T, Deferral] | None = None,
    overtaken: MutableMapping[T, int] | None = None,
    now: float = 0.0,
) -> Generator[tuple[T, Decision], None, None]:
    """Decide for `waiting` in its order, each with what is to become of it. Ends behind the first that has to WAIT and
    lets nobody pass, and behind `looks` that DEFER.

    The caller acts on a decision before it asks for the next: it places, accounts for it, and takes whom it placed or
    failed off the queue (so `waiting` is a copy, or reads lazily and stands it). Where it could not place after all, it
    stops here. `view_of` gives the view as it is by then; the same object as long as nothing changed.

    `deferred` and `overtaken` are kept by the caller from one pass to the next, `now` is in seconds. Who is in
    `deferred` is passed over, without a word, as long as there is nothing new for it. `overtaken` counts how many were
    placed before one that insists on something; the caller takes out who leaves the queue.
    """
    before = dict(deferred) if deferred else {}
    kept: MutableMapping[T, Deferral] = {} if deferred is None else deferred
    kept.clear()
    claims: dict[str, tuple[int, int]] = {}
    unmet: dict[Hashable, tuple[int, float]] = {}  # by owner, how many wait for their gaps, and the longest of these
    insisting: list[T] = []
    passed_over: list[T] = []  # who insist too, and would wait in vain
    view = view_of()
    current, counted, takers = view, 0, None
    for item in waiting:
        latest = view_of()
        if latest is not current:
            view, current, counted, takers = latest, latest, 0, None
        standing = before.get(item)
        if standing is not None and takers is None:
            takers = _takers(current)
        if standing is None or takers is None or not standing.stands(current, takers, now):
            terms = terms_of(item)
            if terms is not None:
                vain, gap = unmet.get(terms.owner, (0, -1.0))
                if vain >= LOOKS_EACH or terms.gap <= gap or len(insisting) >= looks:
                    passed_over.append(item)
                    continue
            if counted != len(kept):  # since the view was made, somebody decided to wait
                view, counted = _with(current, claims), len(kept)
            request = request_of(item)
            decision = choose(item, view, request)
            yield item, decision
            if decision.kind is Kind.WAIT:
                if not decision.lets_pass:
                    return
                insisting.append(item)
                if terms is not None:
                    unmet[terms.owner] = unmet.get(terms.owner, (0, 0.0))[0] + 1, terms.gap
                continue
            if decision.placed and overtaken is not None:
                for other in (*insisting, *passed_over):
                    overtaken[other] = overtaken.get(other, 0) + 1
            if decision.kind is not Kind.DEFER or decision.prefill is None:
                continue
            takers = _takers(current) if takers is None else takers
            queue = decision.options[0].queue if decision.options else 0.0
            standing = Deferral(decision.prefill, now + queue, *work(request, view.index[decision.prefill]), takers)
        kept[item] = standing
        tokens, squares = claims.get(standing.worker_id, (0, 0))
        claims[standing.worker_id] = tokens + standing.tokens, squares + standing.squares
        if len(kept) >= looks:
            return


def _takers(view: FleetView) -> frozenset[str]:
    """The workers that take prompts now."""
    return frozenset([name for name, worker in view.index.items() if worker.usable and worker.accepts_prompt])


def _with(view: FleetView, claims: dict[str, tuple[int, int]]) -> FleetView:
    for worker_id, (tokens, squares) in claims.items():
        if worker_id in view.index:
            view = view.claimed(worker_id, tokens, squares)
    return view


def work(request: PlacementRequest, worker: WorkerView) -> PromptWork:
    """What `worker` has to compute for `request`."""
    held = request.held_tokens(worker)
    return PromptWork(request.tokens - held, request.tokens**2 - held**2)


def least_work(request: PlacementRequest, view: FleetView) -> PromptWork:
    """What whichever worker holds most of `request` has to compute for it."""
    workers = (view.index.get(name) for name in request.held)
    everything = PromptWork(request.tokens, request.tokens**2)
    return min((work(request, worker) for worker in workers if worker is not None), default=everything)
