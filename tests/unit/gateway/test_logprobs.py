"""Log-probabilities in both of OpenAI's shapes."""

from __future__ import annotations

import math

from pdserve.client import Token
from pdserve.gateway.logprobs import LEAST, CompletionLogprobs, chat_logprobs, token_text


def token(data: bytes, logprob: float | None = -1.0, *top: tuple[bytes, float]) -> Token:
    return Token(0, logprob, tuple((0, value) for _, value in top), data, tuple(data for data, _ in top))


def test_half_characters_are_escaped_and_their_bytes_join() -> None:
    data = "\U0001f600".encode()
    entries = chat_logprobs([token(data[:2]), token(data[2:])])["content"]
    assert [entry["token"] for entry in entries] == ["\\xf0\\x9f", "\\x98\\x80"]
    assert bytes([byte for entry in entries for byte in entry["bytes"]]).decode() == "\U0001f600"


def test_whole_characters_are_themselves() -> None:
    assert token_text("Gr\u00fc\u00dfe".encode()) == "Gr\u00fc\u00dfe"


def test_what_cannot_be_is_a_number_in_json() -> None:
    entry = chat_logprobs([token(b"a", -math.inf)])["content"][0]
    assert entry["logprob"] == LEAST


def test_offsets_go_on_from_chunk_to_chunk() -> None:
    """A character counts where its last byte came."""
    lines = CompletionLogprobs()
    emoji = "\U0001f600".encode()
    first = lines.add([token(b"ab"), token(emoji[:1])])
    second = lines.add([token(emoji[1:]), token(b"c")])
    assert first["text_offset"] + second["text_offset"] == [0, 2, 2, 3]
    assert first["tokens"] == ["ab", "bytes:\\xf0"]


def test_the_chosen_token_is_among_the_likely_ones() -> None:
    [found] = CompletionLogprobs().add([token(b"z", -5.0, (b"a", -0.5), (b"b", -1.5))])["top_logprobs"]
    assert found == {"a": -0.5, "b": -1.5, "z": -5.0}


def test_of_two_that_are_written_alike_the_likelier_counts() -> None:
    """A special token and the text of its name."""
    [found] = CompletionLogprobs().add([token(b"a", -3.0, (b"x", -0.5), (b"x", -2.0))])["top_logprobs"]
    assert found == {"x": -0.5, "a": -3.0}
