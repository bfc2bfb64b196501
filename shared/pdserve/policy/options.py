"""What a decision chooses from: short lists of workers, and what each pair of them would mean in seconds."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdserve.policy.disaggregation import Places, Protect, Rules, holds_prompt
from pdserve.policy.fleet import FleetView, PlacementRequest, WorkerView
from pdserve.policy.predict import PromptTime, compute_seconds, gap_after, link_seconds, prompt_time, transfer_tail
from pdserve.policy.reservation import fits

# Of a larger pool only a sample is looked at, and who holds most of the prompt. The best of two random workers is
# already close to the best of all (Mitzenmacher, "The power of two choices", 2001), and the best of 24 as good as it.
LARGE, SAMPLE, HOLDERS = 48, 24, 8
BEST = 3  # of each pool are looked at in pairs
STEP = 0.1  # violations that differ by less than this share of the target count as equal


@dataclass(frozen=True, slots=True)
class Option:
    """A pair, or a decode worker alone (`prefill` None), and its seconds: `queue` and `compute` of the prompt,
    `transfer` that shows, `gap` between tokens. `late` and `slow` are by how much, as a share, the two targets would
    be missed. `accepts`: whether the worker that computes takes prompts now. `cost` decides between equals."""

    prefill: str | None
    decode: str | None
    queue: float
    compute: float
    transfer: float
    gap: float
    late: float
    slow: float
    cost: float
    accepts: bool
    tight: bool = False

    @property
    def ttft(self) -> float:
        return self.queue + self.compute + self.transfer

    @property
    def meets(self) -> bool:
        return not (self.late or self.slow)


@dataclass(frozen=True, slots=True)
class DecodeOption:
    """`tight`: the answer will probably outgrow the worker's free pages."""

    worker: WorkerView
    gap: float
    tight: bool


def shortlist(pool: Sequence[WorkerView], view: FleetView, request: PlacementRequest) -> Sequence[WorkerView]:
    """All of a small pool; of a large one a sample and the best holders."""
    if len(pool) <= LARGE:
        return pool
    holders = sorted(request.held.items(), key=lambda item: -item[1])
    role = pool[0].role
    best = [worker for name, _ in holders[: 2 * HOLDERS] if (worker := view.index.get(name)) and worker.role is role]
    near = [worker for name in request.near if (worker := view.index.get(name)) and worker.role is role]
    drawn = random.Random(request.draw).sample(range(len(pool)), SAMPLE)
    return list({worker.worker_id: worker for worker in (*best, *near, *(pool[i] for i in drawn))}.values())


def with_room(workers: Iterable[WorkerView], request: PlacementRequest, *, decoding: bool) -> list[WorkerView]:
    """Those that are up, not excluded, and have a seat and pages for `request`."""
    fitting = []
    for worker in workers:
        if not worker.usable or not worker.has_seat or worker.worker_id in request.excluded:
            continue
        # A held block costs nothing where others use it too. Where nobody does it is part of the room that is counted,
        # and the worker, which knows, may refuse; whoever was refused once waits until there is room in any case.
        held = 0 if request.was_refused else request.held_tokens(worker) // worker.layout.block_size
        fresh = min(request.blocks(worker, decoding=decoding), worker.total_blocks) - held
        if fits(fresh, worker.room, worker.watermark_blocks, worker.answers > 0):
            fitting.append(worker)
    return fitting


def decode_options(workers: Iterable[WorkerView], view: FleetView, request: PlacementRequest) -> list[DecodeOption]:
    """The best few, best first: those with room to the answer's end, then by gap; what is left of ties goes to who has
    more of the prompt or had the conversation last, to who was given fewest, to more room, to the lower id."""
    found = []
    for worker in workers:
        fresh = request.blocks_to_end(worker) - request.held.get(worker.worker_id, 0)
        tight = request.expected > 0 and fresh > worker.room
        found.append(DecodeOption(worker, gap_after(worker, request, view.answer_speed(worker)), tight))

    def key(option: DecodeOption) -> tuple[bool, float, bool, int, int, int, str]:
        worker = option.worker
        near = worker.worker_id in request.near
        return (
            option.tight,
            option.gap,
            not near,
            worker.outstanding_tokens,
            worker.placed,
            -worker.room,
            worker.worker_id,
        )

    found.sort(key=key)
    # Who has much of the prompt is worth a look even where others are emptier.
    holder = max(found[BEST:], key=lambda option: request.held_tokens(option.worker), default=None)
    best = found[:BEST]
    return [*best, holder] if holder and request.held_tokens(holder.worker) else best


def prefill_options(workers: Iterable[WorkerView], view: FleetView, request: PlacementRequest) -> list[WorkerView]:
    """The best few, best first: by predicted time, then as `decode_options`; and the best that takes prompts now."""
    found = []
    for worker in workers:
        seconds = prompt_time(worker, request, view.prompt_speed(worker), request.held_tokens(worker)).total
        near = worker.worker_id in request.near
        rank = (seconds, not near, worker.outstanding_tokens, worker.placed, -worker.room, worker.worker_id)
        found.append((rank, worker))
    found.sort(key=lambda item: item[0])
    best = [worker for _, worker in found[:BEST]]
    if not any(worker.accepts_prompt for worker in best):
        best += [worker for _, worker in found[BEST:] if worker.accepts_prompt][:1]
    return best


class Judge:
    """Judges pairs for one request. Targets that nobody could keep, however idle, are replaced by what could be."""

    def __init__(
        self,
        view: FleetView,
        request: PlacementRequest,
        prefills: Sequence[WorkerView],
        decodes: Sequence[DecodeOption],
    ) -> None:
        self._view, self._request = view, request
        computing = prefills or [option.worker for option in decodes]
        alone = min(
            (compute_seconds(w, request, view.prompt_speed(w), request.held_tokens(w)) for w in computing), default=0.0
        )
        gap = min((view.answer_speed(o.worker).decode_seconds(1, request.tokens) for o in decodes), default=0.0)
        self.ttft, self.itl = max(request.targets.ttft, 1.5 * alone), max(request.targets.itl, 1.1 * gap)

    def remote(self, prefill: WorkerView, decode: DecodeOption | None) -> Option:
        """Prefill there, decode here; without a decode worker nobody takes the KV."""
        request, speed = self._request, self._view.prompt_speed(prefill)
        held = request.held_tokens(prefill)
        time, transfer, gap, tight = prompt_time(prefill, request, speed, held), 0.0, 0.0, False
        if decode is not None:
            there = request.held_tokens(decode.worker)
            time = self._pulled(prefill, decode.worker, time, held, there)
            transfer = transfer_tail(prefill, decode.worker, request.tokens - there, time.compute)
            answers = self._view.answer_speed(decode.worker)
            gap, tight = gap_after(decode.worker, request, answers, time.total + transfer), decode.tight
        names = prefill.worker_id, decode.worker.worker_id if decode else None
        return self._option(*names, time, transfer, gap, tight, accepts=prefill.accepts_prompt)

    def local(self, decode: DecodeOption, *, disturbs: bool) -> Option:
        """The decode worker does both. `disturbs`: what its running answers lose by it counts, which it does where
        prefill workers are there to spare them: each waits for this prompt's computing, and so would the next."""
        worker, request = decode.worker, self._request
        time = prompt_time(worker, request, self._view.prompt_speed(worker), request.held_tokens(worker))
        gap = longest = gap_after(worker, request, self._view.answer_speed(worker), time.total)
        harm = 0.0
        if disturbs:
            harm = time.compute * (worker.answers + 1)
            chunks = math.ceil((request.tokens - request.held_tokens(worker)) / max(1, worker.max_num_batched_tokens))
            longest = gap + time.compute / chunks if worker.answers else gap
        return self._option(
            None, worker.worker_id, time, 0.0, gap, decode.tight, worker.accepts_prompt, harm=harm, longest=longest
        )

    def _option(
        self,
        prefill: str | None,
        decode: str | None,
        time: PromptTime,
        transfer: float,
        gap: float,
        tight: bool,
        accepts: bool,
        harm: float = 0.0,
        longest: float = 0.0,
    ) -> Option:
        ttft = time.total + transfer
        late = _excess(self._request.waited + ttft, self.ttft)
        slow = _excess(max(gap, longest), self.itl)
        cost = (ttft + harm) / self.ttft + gap / self.itl
        return Option(prefill, decode, time.queue, time.compute, transfer, gap, late, slow, cost, accepts, tight)

    def _pulled(self, prefill: WorkerView, decode: WorkerView, time: PromptTime, held: int, there: int) -> PromptTime:
        """With what the decode worker has and the prefill worker lacks taken over their link, where that is faster."""
        link = decode.links.get(prefill.worker_id)
        if there <= held or link is None or not link.bytes_per_second:
            return time
        rest = compute_seconds(prefill, self._request, self._view.prompt_speed(prefill), there)
        return PromptTime(time.queue, min(time.compute, rest + link_seconds(decode, prefill, there - held)))


def options(
    view: FleetView,
    request: PlacementRequest,
    places: Places,
    prefills: Sequence[WorkerView],
    decodes: Sequence[DecodeOption],
    rules: Rules,
) -> list[Option]:
    """Every pair of the two lists, and decode workers alone where that is allowed, best first."""
    judge, found = Judge(view, request, prefills, decodes), []
    for decode in decodes:
        worker = decode.worker
        if places.remote:
            layout = worker.layout
            found += [judge.remote(prefill, decode) for prefill in prefills if prefill.layout == layout]
        whole = holds_prompt(request, worker)
        measured = view.prompt_speed(worker).knows_prompts and worker.speed.knows_answers
        if whole or (places.local and (measured or not places.remote)):
            found.append(judge.local(decode, disturbs=places.remote and not whole))
    # Targets kept, then the smaller violation of the protected one, then of the other, then cost.
    if rules.protect is Protect.ITL:
        found.sort(key=lambda option: (option.slow, option.late, option.tight, option.cost))
    else:
        found.sort(key=lambda option: (option.late, option.slow, option.tight, option.cost))
    return found


def _excess(value: float, target: float) -> float:
    """By how much `value` misses `target`, as a share of it, in steps."""
    return max(0.0, math.ceil((value / target - 1) / STEP - 1e-9) * STEP)
