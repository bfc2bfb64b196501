"""A worker's speed is learned from its steps, whatever their mix, and follows when it changes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.policy.estimate import Speed, SpeedEstimate, nonnegative, squares

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


SHORT, LONG = (32, squares([(0, 32)]), 0, 0), (512, squares([(0, 512)]), 0, 0)


def observed(estimate: SpeedEstimate, steps_taken: Iterable[Step], times: float = 1.0) -> SpeedEstimate:
    for step in steps_taken:
        estimate.observe(*step, times * seconds(TRUE, step))
    return estimate


@pytest.mark.parametrize("times", [10, 100, 1000])
def test_a_cold_first_step_is_forgotten_at_once(times: float) -> None:
    """What is made on first use, or a process that was stopped in its very first step: by the time that it is said to
    know, it does."""
    estimate = SpeedEstimate()
    estimate.observe(*SHORT, times * seconds(TRUE, SHORT))
    observed(estimate, [SHORT] * 3)
    assert estimate.speed.knows_prompts
    assert prompt(estimate.speed, 0, 32) < 1.2 * prompt(TRUE, 0, 32)


@pytest.mark.parametrize("held_up", [1, 2, 3])
def test_a_stop_in_the_first_steps_does_no_harm(held_up: int) -> None:
    """Eight seconds, where nobody can tell yet that it is too long."""
    estimate = SpeedEstimate()
    for number in range(6):
        estimate.observe(*SHORT, 8.0 if number == held_up else seconds(TRUE, SHORT))
    assert prompt(estimate.speed, 0, 32) < 1.2 * prompt(TRUE, 0, 32)


def test_a_start_on_a_busy_machine_is_made_up_for() -> None:
    """Everything took five times as long while the others started. What was too slow by that much is mostly forgotten
    twenty steps later, and the rest as everything is."""
    estimate = observed(observed(SpeedEstimate(), steps(8, 40), 5.0), steps(9, 20))
    assert prompt(estimate.speed, 0, 2048) < 2.5 * prompt(TRUE, 0, 2048)
    observed(estimate, steps(10, 150))
    assert prompt(estimate.speed, 0, 2048) < 1.3 * prompt(TRUE, 0, 2048)
    assert estimate.speed.decode_seconds(16, 16_000) < 1.3 * TRUE.decode_seconds(16, 16_000)


def test_a_prediction_stands_on_no_coefficient_that_another_made_up_for() -> None:
    """Prompts of nearly one length tell nothing apart. Where one coefficient came out below 0, and the other too large
    for it, leaving out the first would predict multiples of everything that was ever seen."""
    for seed in range(20):
        estimate, rng = SpeedEstimate(), random.Random(seed)
        for _ in range(6):
            new = rng.randrange(100, 140)
            step = new, squares([(0, new)]), 0, 0
            estimate.observe(*step, seconds(TRUE, step) * rng.uniform(0.7, 1.3))
        found = prompt(estimate.speed, 0, 120)
        assert 0.7 * prompt(TRUE, 0, 120) < found < 1.3 * prompt(TRUE, 0, 120), seed


def test_an_hour_of_single_answers_leaves_what_is_known_of_all_else() -> None:
    """Single answers that jitter, then one prompt that was held up: neither moves what a batch or a prompt takes."""
    estimate, rng = observed(SpeedEstimate(), steps(10, 100)), random.Random(10)
    for _ in range(20_000):
        single = 0, 0, 1, rng.randrange(100, 2000)
        estimate.observe(*single, seconds(TRUE, single) * rng.uniform(0.9, 1.3))
    estimate.observe(*LONG, 8.0)
    assert prompt(estimate.speed, 0, 2048) < 1.6 * prompt(TRUE, 0, 2048)
    batch = estimate.speed.decode_seconds(16, 16 * 1000)
    assert batch == pytest.approx(TRUE.decode_seconds(16, 16 * 1000), rel=0.2)
    observed(estimate, [LONG] * 4)
    assert prompt(estimate.speed, 0, 2048) == pytest.approx(prompt(TRUE, 0, 2048), rel=0.25)


def test_a_stop_while_answering_changes_little() -> None:
    """Five seconds in a step of 0.03: a decode worker that was stopped and goes on."""
    estimate = observed(SpeedEstimate(), steps(11, 60))
    estimate.observe(0, 0, 8, 8000, 5.0)
    assert estimate.speed.decode_seconds(8, 8000) < 1.2 * TRUE.decode_seconds(8, 8000)


def test_rounding_and_extremes_are_survived() -> None:
    """Steps of no time and of an hour, of a token and of a million: every coefficient stays a number that is not
    negative."""
    estimate, rng = SpeedEstimate(), random.Random(12)
    for _ in range(3000):
        new, decoding = rng.choice([0, 1, 1 << 20]), rng.choice([0, 1, 1 << 12])
        step = new, squares([(rng.choice([0, 1 << 20]), new)]), decoding, decoding * rng.choice([0, 1 << 20])
        estimate.observe(*step, rng.choice([0.0, 1e-9, 1e-3, 3600.0]))
        speed = estimate.speed
        coefficients = speed.step, speed.token, speed.square, speed.answer, speed.read
        assert all(0.0 <= value < math.inf for value in coefficients), coefficients


@given(st.integers(0, 1 << 32))
def test_the_least_squares_are_those(seed: int) -> None:
    """Of all that are not negative none is better: where a value is above 0 the slope is 0, elsewhere it only rises."""
    rng = random.Random(seed)
    rows = [[rng.gauss(0, 1) for _ in range(5)] for _ in range(7)]
    matrix = [[sum(row[a] * row[b] for row in rows) for b in range(5)] for a in range(5)]
    moments = [rng.gauss(0, 3) for _ in range(5)]
    found = nonnegative(matrix, moments)
    for k, value in enumerate(found):
        slope = sum(a * b for a, b in zip(matrix[k], found, strict=True)) - moments[k]
        assert value >= 0 and slope >= -1e-6
        assert value == 0 or abs(slope) < 1e-6
