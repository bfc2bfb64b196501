"""A new engine knows how fast it is before it is asked for anything, and owes nothing for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pdserve.core.sampling import SamplingParams
from pdserve.core.sequence import SequenceSpec
from pdserve.engine.build import BuiltEngine, EngineOptions, build_engine
from pdserve.engine.engine import Engine
from pdserve.engine.sampler import SampledToken
from pdserve.engine.scheduler import Scheduled, SchedulerConfig
from pdserve.engine.warm_up import RUNS, Shape, shapes, timed_steps
from pdserve.policy.estimate import squares
from tests.tiny_models import make_tiny_model

BLOCK = 16
LONG = SchedulerConfig(4096, 256, 512, 64, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


def build(model: Path, **options: Any) -> BuiltEngine:
    values = {"kv_cache_bytes": 1 << 22, "max_model_len": 512, "block_size": BLOCK, **options}
    return build_engine(EngineOptions(model, dtype="float32", device="cpu", **values))


class Paced:
    """A runner whose steps take what `cost` says of (new, squares, decoding, context), on a clock of its own. The first
    of each shape takes `cold` more, and so does each step whose number is in `held_up`."""

    def __init__(
        self, inner: Any, cost: Callable[[int, int, int, int], float], cold: float, held_up: Sequence[int] = ()
    ) -> None:
        self._inner, self._cost, self._cold, self._held_up = inner, cost, cold, held_up
        self.kv, self.now, self.seen = inner.kv, 0.0, list[tuple[int, ...]]()

    def run(self, batch: Sequence[Scheduled], *hooks: Any) -> list[SampledToken]:
        chunks = [(item.sequence.num_computed, item.count) for item in batch if item.sequence.pending > 1]
        answers = [item.sequence.num_computed for item in batch if item.sequence.pending == 1]
        work = sum(count for _, count in chunks), squares(chunks), len(answers), sum(answers)
        cold = work not in self.seen or len(self.seen) in self._held_up
        self.now += self._cost(*work) + (self._cold if cold else 0.0)
        self.seen.append(work)
        return self._inner.run(batch, *hooks)  # type: ignore[no-any-return]


def cost(new: int, pairs: int, decoding: int, context: int) -> float:
    return 0.01 + 1e-3 * new + 1e-6 * pairs + 5e-4 * decoding + 1e-6 * context


def paced(model: Path, held_up: Sequence[int] = (), cold: float = 3.0, **options: Any) -> tuple[Engine, Paced]:
    built = build(model, **options)
    runner = Paced(built.engine._runner, cost, cold, held_up)
    built.engine._runner, built.engine.clock = runner, lambda: runner.now  # type: ignore[assignment]
    return built.engine, runner


def test_it_knows_its_speed_and_not_what_was_cold(model: Path) -> None:
    """Within a tenth of what steps take, also of ones that it never made, though the first of each shape took 3 s."""
    engine, runner = paced(model)
    engine.warm_up()
    speed = engine.load().speed
    assert speed.knows_prompts and speed.knows_answers
    assert speed.prompt_seconds(400, 400**2, 512) == pytest.approx(cost(400, 400**2, 0, 0), rel=0.1)
    assert speed.decode_seconds(10, 2000) == pytest.approx(cost(0, 0, 10, 2000), rel=0.1)
    assert len(runner.seen) >= 8 * (1 + RUNS)
    assert engine.prefill_rate == pytest.approx(900, rel=0.25)


def test_one_step_of_a_shape_may_be_held_up(model: Path) -> None:
    """A process that is stopped for 3 s in one of the timed steps of each shape."""
    engine, _ = paced(model, held_up=range(2, 200, 1 + RUNS))
    engine.warm_up()
    speed = engine.load().speed
    assert speed.prompt_seconds(400, 400**2, 512) == pytest.approx(cost(400, 400**2, 0, 0), rel=0.1)
    assert speed.decode_seconds(10, 2000) == pytest.approx(cost(0, 0, 10, 2000), rel=0.1)


def test_nothing_of_it_is_left(model: Path) -> None:
    """No pages, no cache, no counts, no outputs, and KV that is zeros as before; answers are what they are without."""
    warm, fresh = build(model), build(model)
    warm.engine.warm_up()
    assert not warm.kv.data.any()
    assert not warm.engine.take_outputs() and not warm.engine.has_work
    warm.engine.scheduler.check_integrity()
    load, idle = warm.engine.load(), fresh.engine.load()
    assert (load.steps, load.busy_seconds, load.computed_tokens, load.sampled_tokens) == (0, 0.0, 0, 0)
    assert (load.free_blocks, load.cached_blocks) == (idle.free_blocks, 0)
    spec = SequenceSpec("r", tuple(range(5, 60)), 55, SamplingParams(0.0, max_tokens=8, ignore_eos=True))
    said = []
    for built in (warm, fresh):
        built.engine.add("t", spec)
        while built.engine.has_work:
            built.engine.step()
        said.append([out.token for out in built.engine.take_outputs().tokens])
    assert said[0] == said[1] and len(said[0]) == 8


def test_what_would_take_too_long_is_left_out(model: Path) -> None:
    """Shapes come in the order of what they take, until the next one would take what is left: by what is known by then.
    Cold steps count for nothing, they pass only once."""
    engine, runner = paced(model, cold=100.0)
    known = dict.fromkeys(shapes(engine.scheduler.config, BLOCK, 128, prompts=True, answers=True), 0.0)
    steps = timed_steps(
        runner,  # type: ignore[arg-type]
        engine.scheduler.config,
        engine.clock,
        lambda shape: cost(*shape.work),
        prompts=True,
        answers=True,
        seconds=1.0,
    )
    made = dict(steps)
    assert 4 <= len(made) < len(known) and list(known)[: len(made)] == list(made)
    assert RUNS * sum(made.values()) <= 1.0 + 1e-9


@pytest.mark.parametrize("options", [{"max_num_seqs": 1}, {"max_num_batched_tokens": 1}, {"max_model_len": 2}, {}])
def test_the_smallest_engines_get_warm_too(model: Path, options: dict[str, int]) -> None:
    """Whatever the limits are, no step goes beyond them."""
    engine, runner = paced(model, **options)
    engine.warm_up()
    config = engine.scheduler.config
    for new, _, decoding, _ in runner.seen:
        assert new <= config.max_num_batched_tokens and decoding <= config.max_num_seqs
    assert engine.load().speed.knows_answers


def test_prefill_workers_make_no_answers_and_the_other_way_round() -> None:
    for prompts, answers in itertools.product((True, False), repeat=2):
        made = list(shapes(LONG, BLOCK, 128, prompts=prompts, answers=answers))
        assert any(shape.new > 1 for shape in made) is prompts
        assert any(shape.new == 1 for shape in made) is answers


def every_shape() -> Iterator[tuple[int, Shape]]:
    for blocks, longest, seqs, batched in itertools.product((1, 3, 128), (2, 40, 4096), (1, 3, 256), (1, 100, 4096)):
        config = SchedulerConfig(longest, seqs, batched, 64, 1)
        for shape in shapes(config, BLOCK, blocks, prompts=True, answers=True):
            assert shape.before + shape.new <= longest and shape.sequences <= seqs
            assert shape.sequences * shape.new <= batched
            yield blocks, shape


def test_no_shape_needs_pages_that_are_not_there() -> None:
    seen = 0
    for blocks, shape in every_shape():
        each = -(-(shape.before + shape.new) // BLOCK)
        assert shape.sequences * each <= blocks, shape
        seen += 1
    assert seen > 100


def test_prompts_are_timed_though_answers_took_all_the_time(model: Path) -> None:
    """Three steps of an answer take 0.9 s, and then one of a prompt is made all the same."""
    engine, runner = paced(model, cold=0.0)
    runner._cost = lambda new, pairs, decoding, context: 0.3
    engine.warm_up()
    assert sum(seen[0] > 0 for seen in runner.seen) == sum(seen[2] > 0 for seen in runner.seen) == 1 + RUNS
