"""The engine gives the same tokens however the work is cut, and owes nothing afterwards."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.core.sampling import SamplingParams
from pdserve.core.sequence import EndReason, Sequence, SequenceSpec
from pdserve.engine.build import EngineOptions, build_engine
from pdserve.engine.engine import Engine
from pdserve.engine.outputs import Ended, TokenOut
from pdserve.engine.scheduler import Phase, Scheduled
from pdserve.policy.batching import SHARE
from tests.tiny_models import make_tiny_model

BLOCK = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture
def engines(model: Path) -> Iterator[object]:
    made: list[Engine] = []

    def make(**options: object) -> Engine:
        values = {"kv_cache_bytes": 1 << 22, "max_model_len": 128, "block_size": BLOCK, **options}
        made.append(build_engine(EngineOptions(model, dtype="float32", device="cpu", **values)).engine)  # type: ignore[arg-type]
        return made[-1]

    yield make
    for engine in made:
        engine.scheduler.check_integrity()
        assert engine.scheduler.pool.num_owned == 0


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((seed * 31 + i * 17 + 5) % 90 + 5 for i in range(length))


def spec(tokens: tuple[int, ...], **params: object) -> SequenceSpec:
    values = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **params}
    return SequenceSpec("r", tokens, len(tokens), SamplingParams(**values))  # type: ignore[arg-type]


def run(engine: Engine) -> tuple[dict[str, list[int]], dict[str, Ended]]:
    """Step until nothing runs; the tokens of each ticket, which came at consecutive positions, and the ends."""
    tokens: dict[str, list[TokenOut]] = {}
    ends: dict[str, Ended] = {}
    while True:
        outputs = engine.take_outputs()
        for token in outputs.tokens:
            tokens.setdefault(token.ticket, []).append(token)
        ends |= {end.ticket: end for end in outputs.ends}
        engine.scheduler.check_integrity()
        if not engine.has_work:
            break
        engine.step()
    for outs in tokens.values():
        assert [out.position for out in outs] == list(range(outs[0].position, outs[0].position + len(outs)))
    return {ticket: [out.token for out in outs] for ticket, outs in tokens.items()}, ends


LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 31, 32, 33, 100)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 7, "top_p": 0.95}], ids=["greedy", "seeded"])
def test_same_tokens_alone_in_a_batch_and_in_any_chunks(engines, params) -> None:  # type: ignore[no-untyped-def]
    alone = {}
    for length in LENGTHS:
        engine = engines(prefix_caching=False, max_num_batched_tokens=512)
        engine.add("t", spec(prompt(length, length), **params))
        alone[str(length)] = run(engine)[0]["t"]
        assert len(alone[str(length)]) == 12
    for chunk, block in ((7, 16), (32, 8), (64, 32), (512, 1)):
        engine = engines(max_num_batched_tokens=chunk, block_size=block)
        for length in LENGTHS:
            engine.add(str(length), spec(prompt(length, length), **params))
        tokens, ends = run(engine)
        assert tokens == alone
        assert {end.reason for end in ends.values()} == {EndReason.LENGTH}


def test_prefix_hits_do_not_change_tokens(engines) -> None:  # type: ignore[no-untyped-def]
    engine = engines()
    for index, length in enumerate((48, 48, 40, 33)):  # a miss, a full hit, partial hits
        sequence = engine.add(str(index), spec(prompt(length)))
        assert sequence.num_cached == (0, 47, 32, 32)[index]
        tokens, _ = run(engine)
        fresh = engines(prefix_caching=False)
        fresh.add(str(index), spec(prompt(length)))
        assert tokens == run(fresh)[0]


def test_replay_after_preemption_continues_the_same_answer(engines) -> None:  # type: ignore[no-untyped-def]
    """A pool too small for both: the young one is preempted, and its replay, given what was shown, ends the same."""
    reference = engines()
    expected = {}
    for name in ("a", "b"):
        reference.add(name, spec(prompt(40, ord(name)), max_tokens=60))
        expected |= run(reference)[0]
    block_bytes = reference.scheduler.layout.block_bytes
    engine = engines(kv_cache_bytes=8 * block_bytes, lookahead_tokens=0)
    for name in ("a", "b"):
        engine.add(name, spec(prompt(40, ord(name)), max_tokens=60))
    tokens, ends = run(engine)
    assert ends["b"].reason is EndReason.PREEMPTED
    assert tokens["a"] == expected["a"]
    shown = tokens["b"]
    assert 0 < len(shown) < 60
    given = prompt(40, ord("b")) + tuple(shown)
    replay = SequenceSpec("r", given, 40, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    sequence = engine.add("b2", replay)
    assert sequence.num_cached > 0
    assert shown + run(engine)[0]["b2"] == expected["b"]


def test_a_sequence_that_hands_off_keeps_its_pages_until_finished(engines) -> None:  # type: ignore[no-untyped-def]
    engine = engines()
    sequence = engine.add("t", spec(prompt(20)), hands_off=True)
    tokens, ends = run(engine)
    assert (len(tokens["t"]), ends) == (1, {})
    assert engine.scheduler.get("t") == (sequence, Phase.SENDING_KV)
    assert len(sequence.block_table) == 2
    engine.finish("t", EndReason.LENGTH)
    assert engine.take_outputs().ends == [Ended("t", EndReason.LENGTH)]


def test_activation_goes_on_where_prefill_stopped(engines) -> None:  # type: ignore[no-untyped-def]
    """KV written from outside: a reserved sequence continues from the first token like the one that computed it."""
    source, target = engines(), engines()
    whole = engines()
    whole.add("t", spec(prompt(37)))
    expected = run(whole)[0]["t"]
    sent = source.add("t", spec(prompt(37)), hands_off=True)
    first = run(source)[0]["t"][0]
    received = target.reserve("t", spec(prompt(37)))
    assert target.load().reserved_blocks == len(received.block_table)
    for from_block, to_block in zip(sent.block_table, received.block_table, strict=False):
        pages = slice(from_block * BLOCK, (from_block + 1) * BLOCK), slice(to_block * BLOCK, (to_block + 1) * BLOCK)
        target._runner.kv.data[:, :, pages[1]] = source._runner.kv.data[:, :, pages[0]]
    target.activate("t", first)
    assert [first, *run(target)[0]["t"]] == expected
    source.finish("t", None)


def test_a_first_token_that_ends_the_answer_ends_it(engines) -> None:  # type: ignore[no-untyped-def]
    engine = engines()
    engine.add("t", spec(prompt(20), max_tokens=1))
    first = run(engine)[0]["t"]
    assert len(first) == 1
    other = engines()
    other.reserve("t", spec(prompt(20), stop_token_ids=(first[0],)))
    other.activate("t", first[0])
    assert other.take_outputs().ends == [Ended("t", EndReason.STOP)]


def test_max_model_len_minus_one_tokens_leave_room_for_one(engines) -> None:  # type: ignore[no-untyped-def]
    engine = engines()
    engine.add("t", spec(prompt(127), max_tokens=50))
    tokens, ends = run(engine)
    assert len(tokens["t"]) == 1
    assert ends["t"].reason is EndReason.LENGTH


def test_load_counts_every_block_once(engines) -> None:  # type: ignore[no-untyped-def]
    engine = engines()
    engine.add("a", spec(prompt(40)), hands_off=True)
    run(engine)
    engine.reserve("b", spec(prompt(33, 4)))
    load = engine.load()
    total = load.free_blocks + load.cached_blocks + load.owned_blocks + load.reserved_blocks
    assert total == engine.scheduler.pool.num_blocks
    assert (load.owned_blocks, load.reserved_blocks) == (3, 3)
    engine.finish("a", None)
    engine.finish("b", EndReason.CANCELLED)


def test_a_wall_clock_that_is_set_back_changes_no_speed(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers place requests by what engines learn of their own speed."""
    times = itertools.count(1 << 60, -(10**9))
    monkeypatch.setattr(time, "time_ns", lambda: next(times))
    engine = engines()
    engine.add("t", spec(prompt(80)))
    run(engine)
    assert engine.prefill_rate > 0


def test_prompts_take_smaller_chunks_beside_an_answer_that_states_a_target(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the engine's own measure: a step takes 10 ms here, and 1 ms for each of its tokens, by a clock of ours."""
    engine, now, steps = engines(prefix_caching=False), [0.0], list[list[int]]()
    schedule = engine.scheduler.schedule

    def counted(*speed: object) -> tuple[list[Scheduled], list[Sequence]]:
        batch, preempted = schedule(*speed)  # type: ignore[arg-type]
        steps.append([scheduled.count for scheduled in batch])
        return batch, preempted

    def forward() -> None:
        now[0] += 0.01 + 0.001 * sum(steps[-1])

    monkeypatch.setattr(engine.scheduler, "schedule", counted)
    engine.clock, engine.on_forward = lambda: now[0], forward
    for length in range(20, 80):
        engine.add(f"learned from {length}", spec(prompt(length, length), max_tokens=3))
        run(engine)
    for target, chunks in ((0.05 / SHARE, [39, 39, 22]), (None, [100])):
        engine.add("answer", replace(spec(prompt(20), max_tokens=20), itl_target=target))
        engine.step()
        steps.clear()
        engine.add("prompt", spec(prompt(100, 1), max_tokens=1))
        run(engine)
        assert [step[1] for step in steps if len(step) > 1] == pytest.approx(chunks, abs=2)
