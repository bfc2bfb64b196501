"""The steps that a new engine makes for itself: they make it warm, and tell how fast it is before anybody asks.

The first step of each shape pays for what is made or loaded on first use, and says nothing of those that follow. Left
to the first requests, it would make them late, and what was learned from them would turn the next ones away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

from pdserve.core.sampling import SamplingParams
from pdserve.core.sequence import Sequence, SequenceSpec
from pdserve.engine.runner import Runner
from pdserve.engine.scheduler import Scheduled, SchedulerConfig
from pdserve.policy.estimate import squares

SECONDS = 1.0  # what the steps that are timed may take in all
RUNS = 3  # timed steps of each shape, of which the median counts: one may be held up
LONGEST = 2048  # tokens of KV that steps read
ANSWERS = (1, 4, 16)
PARTS = (32, 16, 8, 2, 1)  # of the largest chunk; the second is the one far into its prompt
_FILL = 0.01  # KV that is read but was never computed: memory that nobody wrote to is not there yet


class Shape(NamedTuple):
    """A step that computes `new` tokens, behind `before` that have KV, of each of `sequences`. Of an answer `new`
    is 1, of a prompt more."""

    sequences: int
    before: int
    new: int

    @property
    def work(self) -> tuple[int, int, int, int]:
        """As `policy.estimate.SpeedEstimate` takes it."""
        if self.new == 1:
            return 0, 0, self.sequences, self.sequences * self.before
        return self.sequences * self.new, self.sequences * squares([(self.before, self.new)]), 0, 0


def shapes(config: SchedulerConfig, block_size: int, blocks: int, *, prompts: bool, answers: bool) -> Iterator[Shape]:
    """What to time with so many pages, the cheapest first: batches of short and of long answers, short and long chunks,
    and one that is far into its prompt."""
    if answers:
        most = min(config.max_num_seqs, config.max_num_batched_tokens, blocks)
        for sequences in sorted({min(count, most) for count in ANSWERS}):
            room = min(blocks // sequences * block_size, config.max_model_len) - 1
            yield from (Shape(sequences, before, 1) for before in sorted({min(block_size - 1, room), room}) if before)
    if prompts:
        longest = min(blocks * block_size, config.max_model_len)
        chunk = min(config.max_num_batched_tokens, longest)
        for part in PARTS:
            if (count := chunk // part) > 1:
                yield Shape(1, longest - count if part == PARTS[1] else 0, count)


def timed_steps(
    runner: Runner,
    config: SchedulerConfig,
    clock: Callable[[], float],
    expected: Callable[[Shape], float],
    *,
    prompts: bool,
    answers: bool,
    seconds: float = SECONDS,
) -> Iterator[tuple[Shape, float]]:
    """Make each shape's step once, and then RUNS times on `clock`: the shape and the median of its seconds. But for the
    first one of answers, and of prompts, those are passed over that are `expected` to take longer than what is left of
    `seconds`; the caller learns meanwhile.

    The pages must all be free: the first of them are written to, and are zeros afterwards.
    """
    kv = runner.kv
    blocks = min(kv.num_blocks, kv.layout.blocks_for(LONGEST))
    pages = kv.data[:, :, : blocks * kv.block_size]
    timed = set[bool]()  # whether some of answers, and of prompts
    pages.fill_(_FILL)
    try:
        for shape in shapes(config, kv.block_size, blocks, prompts=prompts, answers=answers):
            answer = shape.new == 1
            if answer in timed and RUNS * expected(shape) > seconds:
                continue
            timed.add(answer)
            each = kv.layout.blocks_for(shape.before + shape.new)
            batch = [_scheduled(shape, index, each) for index in range(shape.sequences)]
            runner.run(batch, None)
            taken = median(_timed(runner, batch, clock) for _ in range(RUNS))
            seconds -= RUNS * taken
            yield shape, taken
    finally:
        pages.zero_()


def _timed(runner: Runner, batch: list[Scheduled], clock: Callable[[], float]) -> float:
    began = clock()
    runner.run(batch, None)
    return clock() - began


def _scheduled(shape: Shape, index: int, blocks: int) -> Scheduled:
    """One sequence of such a step, whose pages are those behind the ones of `index` others."""
    total = shape.before + shape.new
    spec = SequenceSpec(f"warm-up {index}", (1,) * total, total, SamplingParams(max_tokens=1))
    table = list(range(index * blocks, (index + 1) * blocks))
    return Scheduled(Sequence(spec.request_id, spec, index, block_table=table, num_computed=shape.before), shape.new)
