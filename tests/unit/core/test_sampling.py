"""Sampling values are checked once, with the field named as the API names it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdserve.core.errors import InvalidRequest
from pdserve.core.sampling import SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"temperature": -0.1}, "sampling.temperature"),
        ({"temperature": NAN}, "sampling.temperature"),
        ({"temperature": INF}, "sampling.temperature"),
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"top_p": 1.01}, "sampling.top_p"),
        ({"top_p": NAN}, "sampling.top_p"),
        ({"min_p": 1.1}, "sampling.min_p"),
        ({"top_k": -1}, "sampling.top_k"),
        ({"presence_penalty": 2.1}, "sampling.presence_penalty"),
        ({"frequency_penalty": NAN}, "sampling.frequency_penalty"),
        ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
        ({"logit_bias": {100: 1.0}}, "sampling.logit_bias"),
        ({"logit_bias": {1: 101.0}}, "sampling.logit_bias"),
        ({"seed": 2**64}, "sampling.seed"),
        ({"max_tokens": 0}, "stopping.max_tokens"),
        ({"min_tokens": 17}, "stopping.min_tokens"),
        ({"stop_token_ids": (100,)}, "stopping.stop_token_ids"),
        ({"logprobs": 21}, "response.logprobs"),
    ],
)
def test_bad_values_are_refused_by_field(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        replace(SamplingParams(), **values).check(vocab_size=100)
    assert error.value.field == field


def test_values_at_the_bounds_pass() -> None:
    SamplingParams(
        temperature=0.0,
        top_p=1.0,
        min_p=1.0,
        presence_penalty=-2.0,
        logit_bias={0: -100.0, 99: 100.0},
        seed=2**64 - 1,
        max_tokens=1,
        min_tokens=1,
        stop_token_ids=(0, 99),
        logprobs=20,
    ).check(vocab_size=100)
