"""When a request's first token would come, and how far apart the others, if it took its place in the queue now.

As the router places: what waits ahead goes first, to whichever worker is free first, so that queues fill to one level
like water; then the request goes where its own first token comes soonest. Where decode workers are full it waits for
room before that: each of their seats and pages is passed on once in an answer's time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdserve.policy.disaggregation import Rules, holds_prompt, prefill_places
from pdserve.policy.fleet import FleetView, PlacementRequest, Role, WorkerView
from pdserve.policy.options import shortlist
from pdserve.policy.predict import HANDOFF, gap_after, prompt_time, stretch, transfer_tail

_TINY = 1e-9  # seconds that anything takes at least


@dataclass(frozen=True, slots=True)
class Ahead:
    """What waits in the router for the same model and goes before a request: their number, their tokens that have to be
    computed, and the squares of those as in `policy.estimate`."""

    tokens: int = 0
    squares: int = 0
    count: int = 0


@dataclass(frozen=True, slots=True)
class _Place:
    """A worker that may compute the prompt: seconds for what is there already, for all that waits in the router if it
    came here, and for the prompt with the part of its transfer that shows."""

    queue: float
    ahead: float
    own: float


class Forecast:
    """For one request, from one view. Of a large pool only a sample is looked at, as for a decision."""

    def __init__(self, view: FleetView, request: PlacementRequest, ahead: Ahead, rules: Rules) -> None:
        self._view, self._request, self._ahead, self._rules = view, request, ahead, rules
        # Nobody takes the KV of a single token, where there is a prefill worker for it.
        single = request.remaining <= 1 and any(worker.usable for worker in view.prefill)
        self._decodes, self._decode_count = self._some(() if single else view.decode)
        self._receiver = min(self._decodes, key=lambda worker: worker.load, default=None)

    def ttft(self) -> tuple[float, float] | None:
        """Seconds from now to the first token, and what they would be with nobody else there. None where no worker that
        may compute the prompt has said how fast it is, or none is up."""
        computing, near, share = self._computing()
        places = [self._place(worker, share) for worker in computing]
        alone = [self._place(worker, 0.0, self._beside(worker) or 1.0) for worker in near]
        if not places and not alone:
            return None
        ready = self._room()
        start = max(ready, _level(places))
        ends = [max(start, place.queue) + place.own for place in places]
        ends += [max(ready, place.queue) + place.own for place in alone]
        return min(ends), min(place.own for place in places + alone)

    @property
    def knows_gaps(self) -> bool:
        """Whether decode workers have said how fast they are, and it is known how long answers get."""
        decodes = self._decodes
        return self._request.expected > 0 and bool(decodes) and self._view.answer_speed(decodes[0]).knows_answers

    @property
    def idle_gap(self) -> float:
        """Seconds between two tokens with nobody else there."""
        speeds = map(self._view.answer_speed, self._decodes)
        return min(speed.decode_seconds(1, self._request.tokens) for speed in speeds)

    def gap(self, seconds: float) -> float:
        """Between two tokens, on the decode worker where that is least, if the request joins in `seconds` and all that
        waits ahead has joined by then."""
        count, tokens = (figure / self._decode_count for figure in (self._ahead.count, self._ahead.tokens))
        return min(
            gap_after(worker, self._request, self._view.answer_speed(worker), seconds, count, tokens)
            for worker in self._decodes
        )

    def _computing(self) -> tuple[list[WorkerView], list[WorkerView], float]:
        """Of those of whom it is known how fast they compute: who takes what waits ahead and then the prompt, who takes
        the prompt alone, and which share the former are of all that do."""
        view, request, decodes = self._view, self._request, self._decodes
        places = prefill_places(view, self._rules)
        some, count = list[WorkerView](), 0
        near = [worker for worker in decodes if holds_prompt(request, worker)]  # what is left of it is next to nothing
        if places.remote:
            some, count = self._some(view.prefill)
            if places.local:  # as long as nobody is disturbed by it
                able = [worker for worker in decodes if worker.speed.knows_answers and self._beside(worker)]
                near += able[self._ahead.count :]
        elif places.local:
            some, count = decodes, self._decode_count
        return self._known(some), self._known(near), len(some) / count if count else 0.0

    def _beside(self, worker: WorkerView) -> float | None:
        """How many times as long the prompt takes on the decode worker `worker` beside its answers; None: they would
        feel it."""
        return stretch(worker, self._request, self._view.answer_speed(worker), self._view.prompt_speed(worker))

    def _place(self, worker: WorkerView, share: float, longer: float = 1.0) -> _Place:
        """`share` is the sample's part of what waits in the router; the prompt takes `longer` times its computing."""
        request, speed, held = self._request, self._view.prompt_speed(worker), self._request.held_tokens(worker)
        time = prompt_time(worker, request, speed, held)
        tokens, squares = round(share * self._ahead.tokens), round(share * self._ahead.squares)
        ahead = speed.prompt_seconds(tokens, squares, worker.max_num_batched_tokens)
        return _Place(time.queue, ahead, longer * time.compute + self._tail(worker, time.compute))

    def _tail(self, worker: WorkerView, compute: float) -> float:
        """What of the transfer shows. A link that was not measured counts as fast: nobody is refused for a guess."""
        receiver = self._receiver
        if worker.role is Role.DECODE or receiver is None:
            return 0.0
        link = worker.links.get(receiver.worker_id)
        if link is None or not link.bytes_per_second:
            return HANDOFF
        missing = self._request.tokens - self._request.held_tokens(receiver)
        return transfer_tail(worker, receiver, missing, compute)

    def _room(self) -> float:
        """Seconds until a decode worker has a seat and pages for the request, behind all that waits ahead; 0 where that
        is now, or where it cannot be told."""
        if not self.knows_gaps:
            return 0.0
        ahead, share = self._ahead, len(self._decodes) / self._decode_count
        first = self._decodes[0]
        # How many are wanted, less those that there are.
        seats = ahead.count * share + 1.0
        pages = float(first.layout.blocks_for(round(share * ahead.tokens)) + self._request.blocks(first, decoding=True))
        seats_rate = pages_rate = 0.0
        for worker in self._decodes:
            seats += worker.answers - worker.max_num_seqs
            seats_rate += worker.max_num_seqs / self._lifetime(worker, max(worker.answers, worker.max_num_seqs))
            pages -= worker.room
            pages_rate += worker.total_blocks / self._lifetime(worker, worker.answers)
        return max(0.0, seats / seats_rate, pages / pages_rate)

    def _lifetime(self, worker: WorkerView, answers: int) -> float:
        """Seconds that an answer takes on `worker` beside so many."""
        gap = self._view.answer_speed(worker).decode_seconds(answers, worker.load)
        return self._request.expected * max(_TINY, gap)

    def _some(self, pool: Sequence[WorkerView]) -> tuple[list[WorkerView], int]:
        """Those of a pool to look at that are up, and how many are up in all."""
        usable = [worker for worker in pool if worker.usable]
        found = shortlist(usable, self._view, self._request) if usable else ()
        return [worker for worker in found if worker.usable], len(usable)

    def _known(self, workers: Iterable[WorkerView]) -> list[WorkerView]:
        return [worker for worker in workers if self._view.prompt_speed(worker).knows_prompts]


def _level(places: Sequence[_Place]) -> float:
    """Seconds until all that waits ahead is computed, if it goes to whoever is free first, in any pieces."""
    done = rate = at = 0.0
    for place in sorted(places, key=lambda place: place.queue):
        if rate and done + rate * (place.queue - at) >= 1.0:
            break
        done, at = done + rate * (place.queue - at), place.queue
        if place.ahead <= 0.0:
            return at
        rate += 1.0 / place.ahead
    return at + (1.0 - done) / rate if rate else 0.0
