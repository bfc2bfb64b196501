"""How many tokens a chunk holds, and what an error body says."""

from __future__ import annotations

import msgspec
import pytest

from pdserve.bench.openai_target import Chunk, _count, _failure


@pytest.mark.parametrize(
    ("chunk", "seen", "count"),
    [
        ('{"choices": [{"text": "ab", "token_ids": [5, 6]}]}', 0, 2),
        ('{"choices": [{"text": "", "token_ids": []}]}', 4, 0),
        ('{"choices": [{"text": "ab", "logprobs": {"tokens": ["a", "b"]}}]}', 0, 2),
        ('{"choices": [{"text": "abc"}], "usage": {"completion_tokens": 7}}', 4, 3),
        ('{"choices": [{"text": "abc"}], "usage": null}', 4, 1),
        ('{"choices": [{"text": "", "finish_reason": "length"}]}', 4, 0),
        ('{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}}', 8, 0),
    ],
)
def test_tokens_of_a_chunk(chunk: str, seen: int, count: int) -> None:
    """By ids, else log-probabilities, else the usage so far, else one for a text."""
    assert _count(msgspec.json.decode(chunk, type=Chunk), seen) == count


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "no\\nroom", "code": 1}}', "no room"),
        (b'{"error": "no room"}', "no room"),
        (b'{"detail": "x"}', "{'detail': 'x'}"),
        (b"<html>", "<html>"),
        (b"", "no message"),
        (b'{"error": {"message": "' + b"x" * 999 + b'"}}', "x" * 300),
    ],
)
def test_what_an_error_says(body: bytes, said: str) -> None:
    failure = _failure(429, body)
    assert (failure.status, str(failure)) == (429, said)
