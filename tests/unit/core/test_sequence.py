"""When an answer ends, and why."""

from __future__ import annotations

import pytest

from pdserve.core.sampling import SamplingParams
from pdserve.core.sequence import EndReason, Sequence, SequenceSpec


def sequence_with(answer: list[int], **params: object) -> Sequence:
    spec = SequenceSpec("r", (1, 2, 3), 3, SamplingParams(**{"max_tokens": 4, **params}), eos_token_ids=(0,))  # type: ignore[arg-type]
    sequence = Sequence("t", spec, 0)
    sequence.tokens += answer
    return sequence


@pytest.mark.parametrize(
    ("answer", "params", "reason"),
    [
        ([5], {}, None),
        ([0], {}, EndReason.STOP),  # end-of-sequence as the very first token
        ([0], {"ignore_eos": True}, None),
        ([0], {"min_tokens": 2}, None),
        ([5, 0], {"min_tokens": 2}, EndReason.STOP),
        ([7], {"stop_token_ids": (7,)}, EndReason.STOP),
        ([7], {"stop_token_ids": (7,), "ignore_eos": True}, EndReason.STOP),
        ([5, 5, 5, 5], {}, EndReason.LENGTH),
        ([5, 5, 5, 0], {}, EndReason.STOP),
        ([5], {"max_tokens": 1}, EndReason.LENGTH),
    ],
)
def test_end(answer: list[int], params: dict[str, object], reason: EndReason | None) -> None:
    assert sequence_with(answer, **params).end_after(answer[-1], max_model_len=100) is reason


def test_the_context_window_ends_it() -> None:
    assert sequence_with([5]).end_after(5, max_model_len=4) is EndReason.LENGTH


def test_shown_tokens_count_as_answer_but_are_given() -> None:
    """A replay carries what the client saw: input for the engine, answer for every limit."""
    spec = SequenceSpec("r", (1, 2, 3, 8, 9), 3, SamplingParams(max_tokens=3))
    sequence = Sequence("t", spec, 0)
    assert (sequence.num_given, sequence.num_answer, sequence.in_prefill) == (5, 2, True)
    sequence.tokens.append(7)
    assert sequence.end_after(7, 100) is EndReason.LENGTH
