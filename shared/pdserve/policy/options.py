"""What a decision chooses from: short lists of workers, and what each pair of them would mean in seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from pdserve.policy.disaggregation import Local, Places, Protect, Rules, holds_prompt
from pdserve.policy.fleet import FleetView, PlacementRequest, WorkerView
from pdserve.policy.predict import (
    PromptTime,
    compute_seconds,
    gap_after,
    leveled,
    leveled_time,
    link_seconds,
    stretch,
    transfer_tail,
)
from pdserve.policy.reservation import fits

# Of a larger pool only a sample is looked at, and who holds most of the prompt. The best of two random workers is
# already close to the best of all (Mitzenmacher, "The power of two choices", 2001), the best of 8 closer than what is
# known of them; and routers that don't know of each other don't all choose the same one.
LARGE, SAMPLE, HOLDERS = 16, 8, 3
BEST = 2  # of each pool are looked at in pairs
IDLE_TTFT, IDLE_ITL = 1.5, 1.1  # times what an idle worker needs: shorter targets nobody could keep
STEP = 0.1  # violations that differ by less than this share of the target count as equal


class Option(NamedTuple):
    """A pair, or a decode worker alone (`prefill` None), and its seconds: `queue` and `compute` of the prompt,
    `transfer` that shows, `gap` between tokens. `late` and `slow` are by how much, as a share, the two targets would
    be missed. `accepts`: whether the worker that computes takes prompts now. `cost` decides between equals.

    `cached` and `there` are leading tokens that the computing and the decode worker have. `local`: why the decode
    worker would be alone. It is `measured` where the seconds stand on what both workers have told of their speed."""

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
    cached: int = 0
    there: int = 0
    local: Local | None = None
    measured: bool = True

    @property
    def ttft(self) -> float:
        return self.queue + self.compute + self.transfer

    @property
    def meets(self) -> bool:
        return not (self.late or self.slow)


@dataclass(slots=True)
class PrefillOption:
    """Who has `held` leading tokens of the prompt, and when it would be through there; `even` are the seconds to choose
    it by (see `predict.leveled`)."""

    worker: WorkerView
    held: int
    time: PromptTime
    even: float


@dataclass(slots=True)
class DecodeOption:
    """Who has `held` leading tokens of the prompt. `tight`: the answer will probably outgrow its free pages."""

    worker: WorkerView
    held: int
    gap: float
    tight: bool


def shortlist(pool: Sequence[WorkerView], view: FleetView, request: PlacementRequest) -> Sequence[WorkerView]:
    """All of a small pool; of a large one a sample and the best holders."""
    if len(pool) <= LARGE:
        return pool
    role, found = pool[0].role, dict[str, WorkerView]()
    holders = sorted(request.held, key=request.held.__getitem__, reverse=True)[: 2 * HOLDERS]  # of both pools
    for worker_id in (*holders, *request.near):
        worker = view.index.get(worker_id)
        if worker is not None and worker.role is role:
            found[worker_id] = worker
    for place in _draws(request.draw, len(pool)):
        found[pool[place].worker_id] = pool[place]
    return list(found.values())


def _draws(seed: int, size: int) -> Iterator[int]:
    """SAMPLE places below `size`, some perhaps twice: Knuth's MMIX generator, whose high bits are the good ones."""
    state = seed * 0x9E3779B97F4A7C15  # neighbouring seeds begin far apart
    for _ in range(SAMPLE):
        state = (state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        yield (state >> 32) * size >> 32


def _with_room(
    workers: Iterable[WorkerView], request: PlacementRequest, *, decoding: bool
) -> Iterator[tuple[WorkerView, int, int]]:
    """Those that are up and have a seat and pages for `request`, each with the leading tokens and blocks of it that it
    has in its cache."""
    needed: dict[tuple[int, int], int] = {}  # workers of one kind need one sum
    for worker in workers:
        others, size = worker.answers, worker.layout.block_size
        if not worker.usable or others >= worker.max_num_seqs or worker.worker_id in request.excluded:
            continue
        kind = size, worker.lookahead_tokens
        blocks = needed.get(kind)
        if blocks is None:
            blocks = needed[kind] = request.blocks(worker, decoding=decoding)
        # A held block costs nothing where others use it too. Where nobody does it is part of the room that is counted,
        # and the worker, which knows, may refuse; whoever was refused once waits until there is room in any case.
        tokens = request.held_tokens(worker)
        held = tokens // size
        fresh = min(blocks, worker.total_blocks) - (0 if request.was_refused else held)
        if fits(fresh, worker.room, worker.watermark_blocks, others > 0):
            yield worker, tokens, held


def decode_options(
    workers: Iterable[WorkerView], view: FleetView, request: PlacementRequest, *, computing: bool
) -> list[DecodeOption]:
    """The best few that have room, best first: those with room to the answer's end, those that keep the target, or
    miss it by least, then by gap; what is left of ties goes to who had the conversation last, to who was given fewest,
    to more room, to the lower id. And who has most of the prompt. Where they are `computing` prompts, those too that
    would be through with this one first."""
    found, fastest, tokens_to_end = [], view.assumed.answers, request.tokens_to_end
    target = max(request.planned.itl, IDLE_ITL * fastest.decode_seconds(1, request.tokens))
    for worker, held, blocks in _with_room(workers, request, decoding=True):
        name, room = worker.worker_id, worker.room
        tight = request.expected > 0 and worker.layout.blocks_for(tokens_to_end) - blocks > room
        answers, context = worker.answers + 1, worker.load + request.tokens
        gap = view.answer_speed(worker).decode_seconds(answers, context)
        even = leveled(gap, fastest.decode_seconds(answers, context))
        ties = name not in request.near, worker.outstanding_tokens, worker.placed, -room, name
        found.append(((tight, _excess(gap, target), even, ties), (worker, held, gap, tight)))
    found.sort(key=itemgetter(0))
    best, others = [DecodeOption(*facts) for _, facts in found[:BEST]], found[BEST:]
    if computing and others:
        soonest = sorted((DecodeOption(*facts) for _, facts in others), key=lambda o: _soonest(o, view, request))
        best += soonest[:BEST]
    holder = max((facts for _, facts in others), key=itemgetter(1), default=None)
    if holder is not None and holder[1] > max(option.held for option in best):
        best.append(DecodeOption(*holder))
    return best


def _soonest(option: DecodeOption, view: FleetView, request: PlacementRequest) -> tuple[bool, bool, float]:
    """Sorts decode workers that compute prompts: who takes one now, has room to the end, is through with it first."""
    _, even = _prompt_times(option.worker, request, view, option.held)
    return not option.worker.accepts_prompt, option.tight, even


def _prompt_times(
    worker: WorkerView, request: PlacementRequest, view: FleetView, held: int
) -> tuple[PromptTime, float]:
    """When the prompt would be through on `worker`, which has `held` tokens of it, and the seconds to choose it by."""
    return leveled_time(worker, request, view.prompt_speed(worker), view.assumed.prompts, held)


def prefill_options(workers: Iterable[WorkerView], view: FleetView, request: PlacementRequest) -> list[PrefillOption]:
    """The best few that have room, best first: those that keep the target, or miss it by least, then by predicted time,
    then as `decode_options`; and the best that takes prompts now."""
    found, tokens = [], request.tokens
    idle = view.assumed.prompts.prompt_seconds(tokens, tokens * tokens, tokens)
    target = max(request.planned.ttft, IDLE_TTFT * idle)
    for worker, held, _ in _with_room(workers, request, decoding=False):
        time, even = _prompt_times(worker, request, view, held)
        late, name = _excess(request.waited + time.total, target), worker.worker_id
        ties = name not in request.near, worker.outstanding_tokens, worker.placed, -worker.room, name
        found.append(((late, even, ties), (worker, held, time, even)))
    found.sort(key=itemgetter(0))
    best, others = [PrefillOption(*facts) for _, facts in found[:BEST]], found[BEST:]
    if not any(option.worker.accepts_prompt for option in best):
        best += [PrefillOption(*facts) for _, facts in others if facts[0].accepts_prompt][:1]
    return best


class Judge:
    """Judges pairs for one request. Targets that nobody could keep, however idle, are replaced by what could be."""

    def __init__(
        self,
        view: FleetView,
        request: PlacementRequest,
        prefills: Sequence[PrefillOption],
        decodes: Sequence[DecodeOption],
    ) -> None:
        self._view, self._request = view, request
        alone = min((option.time.compute for option in prefills), default=0.0)
        if not prefills:
            alone = min((self._compute(option.worker, option.held) for option in decodes), default=0.0)
        gap = min((view.answer_speed(o.worker).decode_seconds(1, request.tokens) for o in decodes), default=0.0)
        targets = request.planned
        self.ttft, self.itl = max(targets.ttft, IDLE_TTFT * alone), max(targets.itl, IDLE_ITL * gap)

    def alone(self, prefill: PrefillOption) -> Option:
        """Prefill there; nobody takes the KV."""
        worker, time, cost = prefill.worker, prefill.time, prefill.even / self.ttft
        late, slow = self._misses(time.total, 0.0)
        facts = time.queue, time.compute, 0.0, 0.0, late, slow, cost, worker.accepts_prompt, False, prefill.held, 0
        return Option(worker.worker_id, None, *facts, None, worker.speed.knows_prompts)

    def remote(self, prefill: PrefillOption, decode: DecodeOption) -> Option:
        """Prefill there, decode here."""
        sender, receiver, request = prefill.worker, decode.worker, self._request
        time, even = prefill.time, prefill.even
        if decode.held > prefill.held:
            time = self._pulled(prefill, decode)
            even *= time.total / prefill.time.total if prefill.time.total else 1.0
        transfer = transfer_tail(sender, receiver, request.tokens - decode.held, time.compute)
        ttft = time.total + transfer
        gap, even_gap = self._gaps(receiver, ttft)
        cost = (even + transfer) / self.ttft + even_gap / self.itl
        late, slow = self._misses(ttft, gap)
        facts = time.queue, time.compute, transfer, gap, late, slow, cost, sender.accepts_prompt, decode.tight
        measured = sender.speed.knows_prompts and receiver.speed.knows_answers
        return Option(sender.worker_id, receiver.worker_id, *facts, prefill.held, decode.held, None, measured)

    def local(self, decode: DecodeOption, why: Local) -> Option:
        """The decode worker does both. What its running answers lose by it counts where prefill workers are there to
        spare them (Local.CONDITIONAL): each waits for this prompt's computing, and so would the next. Among places that
        keep the targets they are spared; but where every answer has a target for its gaps and keeps it, this prompt
        is not late for their sake."""
        worker, request, held = decode.worker, self._request, decode.held
        time, even = _prompt_times(worker, request, self._view, held)
        gap, even_gap = self._gaps(worker, time.total)
        harm = felt = 0.0
        longest = gap
        if why is Local.CONDITIONAL:
            fastest = compute_seconds(worker, request, self._view.assumed.prompts, held)
            harm = felt = leveled(time.compute, fastest) * (worker.answers + 1)
            view = self._view
            longer = stretch(worker, request, view.answer_speed(worker), view.prompt_speed(worker))
            if longer is not None:
                felt = 0.0
                time, even = PromptTime(time.queue, time.compute * longer), even * longer
            else:
                chunks = math.ceil((request.tokens - held) / max(1, worker.max_num_batched_tokens))
                longest = gap + time.compute / chunks
        cost = (even + harm) / self.ttft + even_gap / self.itl
        late, slow = self._misses(time.total + felt, longest)
        facts = time.queue, time.compute, 0.0, gap, late, slow, cost, worker.accepts_prompt, decode.tight, held, held
        measured = worker.speed.knows_prompts and worker.speed.knows_answers
        return Option(None, worker.worker_id, *facts, why, measured)

    def _misses(self, ttft: float, gap: float) -> tuple[float, float]:
        """By how much the first token would be late, and the others slow."""
        return _excess(self._request.waited + ttft, self.ttft), _excess(gap, self.itl)

    def _gaps(self, worker: WorkerView, seconds: float) -> tuple[float, float]:
        """Between tokens on `worker` once this answer has joined in `seconds`, and what to choose it by."""
        view, request = self._view, self._request
        gap = gap_after(worker, request, view.answer_speed(worker), seconds)
        return gap, leveled(gap, gap_after(worker, request, view.assumed.answers, seconds))

    def _compute(self, worker: WorkerView, held: int) -> float:
        return compute_seconds(worker, self._request, self._view.prompt_speed(worker), held)

    def _pulled(self, prefill: PrefillOption, decode: DecodeOption) -> PromptTime:
        """With what the decode worker has and the prefill worker lacks taken over their link, where that is faster."""
        worker, time = prefill.worker, prefill.time
        link = decode.worker.links.get(worker.worker_id)
        if link is None or not link.bytes_per_second:
            return time
        pulled = link_seconds(decode.worker, worker, decode.held - prefill.held) + self._compute(worker, decode.held)
        return PromptTime(time.queue, min(time.compute, pulled))


def options(
    view: FleetView,
    request: PlacementRequest,
    places: Places,
    prefills: Sequence[PrefillOption],
    decodes: Sequence[DecodeOption],
    rules: Rules,
) -> list[Option]:
    """Every pair of the two lists, and decode workers alone where that is allowed, best first."""
    judge, found = Judge(view, request, prefills, decodes), []
    for decode in decodes:
        worker = decode.worker
        if places.remote:
            layout = worker.layout
            found += [judge.remote(prefill, decode) for prefill in prefills if prefill.worker.layout == layout]
        whole = holds_prompt(request, worker)
        measured = view.prompt_speed(worker).knows_prompts and worker.speed.knows_answers
        if whole or (places.local and (measured or not places.remote)):
            why = Local.HELD if whole else Local.CONDITIONAL if places.remote else Local.NO_PREFILL_WORKERS
            found.append(judge.local(decode, why))
    # Targets kept, then the smaller violation of the protected one, then of the other, then cost.
    if rules.protect is Protect.ITL:
        found.sort(key=lambda option: (option.slow, option.late, option.tight, option.cost))
    else:
        found.sort(key=lambda option: (option.late, option.slow, option.tight, option.cost))
    return found


def _excess(value: float, target: float) -> float:
    """By how much `value` misses `target`, as a share of it, in steps."""
    return math.ceil((value / target - 1) / STEP - 1e-9) * STEP if value > target else 0.0
