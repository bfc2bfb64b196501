"""A worker's speed is learned from its steps, whatever their mix, and follows when it changes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from pdserve.policy.estimate import Speed, SpeedEstimate, squares

TRUE = Speed(step=0.02, token=1.1e-4, square=7e-10, answer=4e-4, read=3e-8)
Step = tuple[int, int, int, int]


def steps(seed: int, count: int) -> Iterator[Step]:
    """Steps of a co-located worker: chunks of prompts of all lengths, between none and 64 answers."""
    rng = random.Random(seed)
    for _ in range(count):
        before, new = rng.randrange(0, 30_000), rng.choice([0, 128, 512, 2048])
        decoding = rng.randrange(0, 65)
        yield new, squares([(before, new)]), decoding, decoding * rng.randrange(100, 4000)


def prompt(speed: Speed, cached: int, tokens: int) -> float:
    """A prompt alone, in chunks of 2,048."""
    return speed.prompt_seconds(tokens - cached, squares([(cached, tokens - cached)]), 2048)


def seconds(speed: Speed, step: Step) -> float:
    new, square, decoding, context = step
    return speed.step + speed.token * new + speed.square * square + speed.answer * decoding + speed.read * context


def test_finds_the_coefficients() -> None:
    """From exact times it finds what made them."""
    estimate = SpeedEstimate()
    for step in steps(1, 400):
        estimate.observe(*step, seconds(TRUE, step))
    found = estimate.speed
    for name in ("step", "token", "square", "answer", "read"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.02), name
    assert found.prompts + found.answers >= 400 and found.knows_prompts and found.knows_answers


def test_noise_averages_out() -> None:
    """Steps that jitter by a fifth still predict within a twentieth."""
    estimate, rng = SpeedEstimate(), random.Random(2)
    for step in steps(2, 3000):
        estimate.observe(*step, seconds(TRUE, step) * rng.uniform(0.8, 1.2))
    found = estimate.speed
    assert prompt(found, 0, 8192) == pytest.approx(prompt(TRUE, 0, 8192), rel=0.05)
    assert found.decode_seconds(32, 60_000) == pytest.approx(TRUE.decode_seconds(32, 60_000), rel=0.05)


def test_follows_a_change() -> None:
    """A worker that becomes three times slower is known to be so within some hundred steps."""
    estimate = SpeedEstimate()
    for step in steps(3, 2000):
        estimate.observe(*step, seconds(TRUE, step))
    for step in steps(4, 2000):
        estimate.observe(*step, 3 * seconds(TRUE, step))
    assert prompt(estimate.speed, 0, 4096) == pytest.approx(3 * prompt(TRUE, 0, 4096), rel=0.05)


def test_one_kind_of_step_for_long_does_no_harm() -> None:
    """Hours of equal decode steps leave the prompts' coefficients as they were, and one other step does not throw
    them."""
    estimate = SpeedEstimate()
    for step in steps(5, 400):
        estimate.observe(*step, seconds(TRUE, step))
    equal = (0, 0, 8, 8000)
    for _ in range(50_000):
        estimate.observe(*equal, seconds(TRUE, equal))
    assert prompt(estimate.speed, 0, 4096) == pytest.approx(prompt(TRUE, 0, 4096), rel=0.05)
    odd = (512, squares([(0, 512)]), 8, 8000)
    estimate.observe(*odd, seconds(TRUE, odd))
    assert prompt(estimate.speed, 0, 4096) == pytest.approx(prompt(TRUE, 0, 4096), rel=0.05)


def test_never_negative() -> None:
    """Whatever was seen, no coefficient is below 0: a prediction would be nonsense."""
    estimate, rng = SpeedEstimate(), random.Random(6)
    for step in steps(6, 300):
        estimate.observe(*step, rng.expovariate(10))
        speed = estimate.speed
        assert min(speed.step, speed.token, speed.square, speed.answer, speed.read) >= 0


def test_predictions_are_the_formula() -> None:
    """A cached beginning saves its tokens and its square; every chunk has a step's constant."""
    assert prompt(TRUE, 0, 4096) == pytest.approx(2 * 0.02 + 4096 * 1.1e-4 + 4096**2 * 7e-10)
    assert prompt(TRUE, 4000, 4096) == pytest.approx(0.02 + 96 * 1.1e-4 + (4096**2 - 4000**2) * 7e-10)
    assert TRUE.decode_seconds(10, 5000) == pytest.approx(0.02 + 10 * 4e-4 + 5000 * 3e-8)
    assert squares([(0, 3), (2, 2)]) == 9 + 12


def test_one_step_that_was_held_up_changes_little() -> None:
    """A process that was stopped for 8 s is no slow worker: it would get nothing to do, and not learn better."""
    estimate, work = SpeedEstimate(), list(steps(5, 400))
    for step in work:
        estimate.observe(*step, seconds(TRUE, step))
    estimate.observe(512, squares([(0, 512)]), 0, 0, 8.0)
    assert prompt(estimate.speed, 0, 2048) < 1.2 * prompt(TRUE, 0, 2048)


def test_a_worker_that_stays_slow_is_believed() -> None:
    """Thirty times as slow from one step to the next, as by a machine that others took over."""
    estimate = SpeedEstimate()
    for step in steps(6, 400):
        estimate.observe(*step, seconds(TRUE, step))
    for step in steps(7, 400):
        estimate.observe(*step, 30 * seconds(TRUE, step))
    assert prompt(estimate.speed, 0, 2048) > 20 * prompt(TRUE, 0, 2048)
