"""One pass over a queue, on literal views: who goes, who waits, and who may pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pdserve.core.layout import KVLayout
from pdserve.policy.disaggregation import Rules
from pdserve.policy.estimate import Speed
from pdserve.policy.fleet import FleetView, PlacementRequest, Role, WorkerView
from pdserve.policy.queueing import Deferral, plan_pass, work
from pdserve.policy.routing import Decision, Kind, choose_pair

LAYOUT = KVLayout(16, 2, 2, 16, "float32", bytes(16))
SPEED = Speed(step=1e-3, token=1e-4, answer=1e-4, prompts=9, answers=9)


def worker(worker_id: str, **options: object) -> WorkerView:
    role = Role.PREFILL if worker_id.startswith("p") else Role.DECODE
    made = WorkerView(worker_id, role, LAYOUT, 64, 512, total_blocks=1000, available_blocks=1000, speed=SPEED)
    return replace(made, **options)  # type: ignore[arg-type]


class Queue:
    """Requests by name, and a fleet in which what is placed counts."""

    def __init__(self, workers: Iterable[WorkerView], **requests: PlacementRequest) -> None:
        self.view = FleetView.of_workers(workers)
        self.requests = requests
        self.seen: list[FleetView] = []

    def run(
        self, looks: int = 16, deferred: dict[str, Deferral] | None = None, now: float = 0.0
    ) -> list[tuple[str, Kind, str | None]]:
        done = []
        steps = plan_pass(
            list(self.requests),
            lambda: self.view,
            self.requests.__getitem__,
            self.choose,
            looks,
            deferred=deferred,
            now=now,
        )
        for name, decision in steps:
            done.append((name, decision.kind, decision.prefill))
            if decision.placed:
                self._place(decision, self.requests[name])
        return done

    def choose(self, name: str, view: FleetView, request: PlacementRequest) -> Decision:
        self.seen.append(view)
        return choose_pair(view, request, Rules(local_prefill=False))

    def _place(self, decision: Decision, request: PlacementRequest) -> None:
        workers = dict(self.view.index)
        if decision.prefill:
            old = workers[decision.prefill]
            workers[decision.prefill] = replace(old, prefill_tokens=old.prefill_tokens + request.tokens)
        self.view = FleetView.of_workers(workers.values())


LONG = PlacementRequest(600, 100)


def test_what_is_placed_counts_for_the_next() -> None:
    queue = Queue([worker("p0"), worker("p1"), worker("d0")], a=LONG, b=LONG)
    assert queue.run() == [("a", Kind.REMOTE, "p0"), ("b", Kind.REMOTE, "p1")]


def test_nobody_overtakes_who_waits_for_room() -> None:
    """The second needs more pages than there are now; the third would fit, and is not even looked at."""
    fleet = [worker("p0"), worker("d0", available_blocks=100)]
    queue = Queue(fleet, a=PlacementRequest(64, 10), b=PlacementRequest(1700, 10), c=PlacementRequest(64, 10))
    assert [(name, kind) for name, kind, _ in queue.run()] == [("a", Kind.REMOTE), ("b", Kind.WAIT)]
    assert len(queue.seen) == 2


def test_who_waits_for_a_prefill_worker_is_passed_by_others() -> None:
    """ "a" has its prefix where a queue is short but full; "b" goes at once to the other one."""
    holder = worker("p0", reported_prefill_tokens=512, prefill_squares=512**2)
    queue = Queue(
        [holder, worker("p1"), worker("d0")],
        a=PlacementRequest(8000, 100, held={"p0": 490}),
        b=PlacementRequest(64, 100),
    )
    assert queue.run() == [("a", Kind.DEFER, "p0"), ("b", Kind.REMOTE, "p1")]


def test_claims_spread_those_that_wait() -> None:
    """Two workers with full queues of equal length: each next one waits for the other, not all for the first."""
    full = {"reported_prefill_tokens": 600, "reported_prefill_squares": 600**2}
    fleet = [worker("p0", **full), worker("p1", **full), worker("d0")]
    queue = Queue(fleet, **dict.fromkeys("abcd", LONG))
    assert [prefill for _, _, prefill in queue.run()] == ["p0", "p1", "p0", "p1"]
    assert all(view.index["p0"].claimed_tokens == 0 for view in queue.seen[:1])
    assert [view.index["p0"].claimed_tokens for view in queue.seen] == [0, 600, 600, 1200]
    assert queue.view.index["p0"].claimed_tokens == 0  # the pass keeps its claims to itself


def test_claims_outlive_a_placement_between() -> None:
    """The view is another one after a placement; who was deferred before still counts in it."""
    holder = worker("p0", reported_prefill_tokens=512)
    queue = Queue(
        [holder, worker("p1"), worker("d0")],
        a=PlacementRequest(8000, 100, held={"p0": 490}),
        b=PlacementRequest(64, 100),
        c=PlacementRequest(64, 100),
    )
    queue.run()
    tokens, squares = work(queue.requests["a"], holder)
    assert (tokens, squares) == (8000 - 490 * 16, 8000**2 - (490 * 16) ** 2)
    last = queue.seen[-1].index
    assert (last["p0"].claimed_tokens, last["p0"].claimed_squares) == (tokens, squares)
    assert last["p1"].prefill_tokens == 64


def test_who_waits_is_not_asked_again_for_nothing() -> None:
    """Not before its worker takes prompts, is gone, or takes longer than it was to; and it still counts in the view of
    those behind it."""
    full = worker("p0", reported_prefill_tokens=1024)
    queue = Queue([full, worker("d0")], a=LONG, b=LONG)
    memory: dict[str, Deferral] = {}
    assert [kind for _, kind, _ in queue.run(deferred=memory)] == [Kind.DEFER, Kind.DEFER]
    assert memory["a"].until == SPEED.prompt_seconds(1024, 0, 512)
    assert queue.run(deferred=memory, now=0.01) == []
    assert set(memory) == {"a", "b"}

    queue.requests["c"] = LONG
    assert queue.run(deferred=memory, now=0.02) == [("c", Kind.DEFER, "p0")]
    assert queue.seen[-1].index["p0"].claimed_tokens == 1200

    assert [name for name, _, _ in queue.run(deferred=memory, now=memory["a"].until)] == ["a"]
    for change in (replace(full, reported_prefill_tokens=0), replace(full, connected=False)):
        queue.view = FleetView.of_workers([change, worker("d0")])
        assert queue.run(deferred=dict(memory), now=0.02)[0][0] == "a"


def test_who_waits_hears_of_a_worker_that_takes_prompts_now() -> None:
    """One that is new, and one that was full before; one that took prompts all along was considered already."""
    full = {"reported_prefill_tokens": 1024}
    busy = [worker("p0", **full), worker("p1", reported_prefill_tokens=1500), worker("d0")]
    queue = Queue(busy, **dict.fromkeys([f"r{index}" for index in range(17)], LONG))
    memory: dict[str, Deferral] = {}
    assert len(queue.run(deferred=memory)) == len(memory) == 16
    assert queue.run(deferred=memory, now=0.01) == []
    for free, change in (("p2", [*busy, worker("p2")]), ("p1", [busy[0], worker("p1"), busy[2]])):
        queue.view = FleetView.of_workers(change)
        assert queue.run(deferred=dict(memory), now=0.01)[0] == ("r0", Kind.REMOTE, free)
    patient = PlacementRequest(8000, 100, held={"p0": 490})
    queue = Queue([worker("p0", reported_prefill_tokens=600), worker("p1"), worker("d0")], a=patient)
    assert queue.run(deferred=memory) == [("a", Kind.DEFER, "p0")]
    assert queue.run(deferred=memory, now=0.01) == []


def test_a_memory_is_of_the_last_pass() -> None:
    """Who left the queue is forgotten."""
    queue = Queue([worker("p0", reported_prefill_tokens=1024), worker("d0")], a=LONG, b=LONG)
    memory: dict[str, Deferral] = {}
    queue.run(deferred=memory)
    del queue.requests["a"]
    queue.run(deferred=memory)
    assert set(memory) == {"b"}


def test_a_pass_looks_at_so_many() -> None:
    queue = Queue([worker("p0", reported_prefill_tokens=600), worker("d0")], **dict.fromkeys("abcde", LONG))
    assert [name for name, _, _ in queue.run(looks=3)] == ["a", "b", "c"]


def test_who_can_never_be_served_holds_up_nobody() -> None:
    queue = Queue([worker("p0"), worker("d0")], a=PlacementRequest(10**6, 10), b=PlacementRequest(64, 10))
    assert [(name, kind) for name, kind, _ in queue.run()] == [("a", Kind.NEVER), ("b", Kind.REMOTE)]


def test_a_caller_that_stops_is_asked_no_further() -> None:
    """As one does whose worker refused after all."""
    queue = Queue([worker("p0"), worker("d0")], **dict.fromkeys("abc", LONG))
    steps = plan_pass(list(queue.requests), lambda: queue.view, queue.requests.__getitem__, queue.choose)
    next(steps)
    steps.close()
    assert len(queue.seen) == 1
