"""Log-probabilities in OpenAI's two shapes. Pure.

A token that is no whole character by itself is written with an escape for each of its bytes (``\\xf0\\x9f``), as OpenAI
does; `bytes` has them as numbers, to be joined. Text completions write ``bytes:`` before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

from pdserve.client import Token

# JSON has no infinity; this is what vLLM writes for a token that cannot be.
LEAST = -9999.0


def token_text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def chat_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion and of its chunks."""
    return {
        "content": [
            {
                **_entry(token.token_bytes, token.logprob),
                "top_logprobs": [
                    _entry(data, value) for data, (_, value) in zip(token.top_bytes, token.top, strict=False)
                ],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _entry(data: bytes, value: float | None) -> dict[str, Any]:
    return {"token": token_text(data), "logprob": _finite(value), "bytes": list(data)}


class CompletionLogprobs:
    """`choices[].logprobs` of one text completion; `text_offset` goes on from chunk to chunk.

    Offsets count the characters that the tokens before complete, special tokens among them.
    """

    def __init__(self) -> None:
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Sequence[Token]) -> dict[str, Any]:
        offsets = list(self._offsets(tokens))
        return {
            "tokens": [_legacy_text(token.token_bytes) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [_by_text(token) for token in tokens],
            "text_offset": offsets,
        }

    def _offsets(self, tokens: Sequence[Token]) -> Iterator[int]:
        for token in tokens:
            yield self._offset
            self._offset += len(self._decoder.decode(token.token_bytes))


def _by_text(token: Token) -> dict[str, float]:
    """The likely tokens and the chosen one. Of two that are written alike the likelier counts."""
    found: dict[str, float] = {}
    pairs = [(data, value) for data, (_, value) in zip(token.top_bytes, token.top, strict=False)]
    for data, value in [*pairs, (token.token_bytes, token.logprob)]:
        text = _legacy_text(data)
        found[text] = max(found.get(text, LEAST), _finite(value))
    return found


def _legacy_text(data: bytes) -> str:
    text = token_text(data)
    return text if text.encode() == data else f"bytes:{text}"


def _finite(value: float | None) -> float:
    return LEAST if value is None else max(LEAST, value)
