"""Answers as OpenAI's JSON: whole, and in chunks. Pure. A chunk costs one encoding of its text, nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pdserve.client import Finish, Output, Token, Usage
from pdserve.gateway.logprobs import CompletionLogprobs, chat_logprobs

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of an answer has. `created` is in seconds of the epoch."""

    chat: bool
    id: str
    created: int
    model: str


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"


def usage_json(usages: Sequence[Usage]) -> dict[str, Any]:
    """The sum over all choices."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }


def stop_reason(finish: Finish, named: frozenset[int]) -> str | int | None:
    """vLLM's field: the stop string or the stop token that the client had named; None for any other end."""
    if finish.stop_string is not None:
        return finish.stop_string
    return finish.stop_token_id if finish.stop_token_id in named else None


class Chunks:
    """The chunks of one streamed answer with `choices` choices."""

    def __init__(
        self,
        head: Head,
        choices: int,
        *,
        logprobs: bool,
        include_usage: bool,
        named: frozenset[int],
        token_ids: bool = False,
    ) -> None:
        """`named` are the stop tokens that the client named. With `token_ids` each chunk has those of its tokens, as
        vLLM has them, and tokens that add no text yet make a chunk, too."""
        kind = "chat.completion.chunk" if head.chat else "text_completion"
        self._fields = {"id": head.id, "object": kind, "created": head.created, "model": head.model}
        self._tail: dict[str, Any] = {"usage": None} if include_usage else {}
        self._chat, self._logprobs, self._named = head.chat, logprobs, named
        self._token_ids = token_ids
        self._legacy = [CompletionLogprobs() for _ in range(choices)]
        before = b"data: " + _encode(self._fields)[:-1] + b',"choices":[{"index":'
        middle = b',"delta":{"content":' if head.chat else b',"text":'
        self._before = [before + str(index).encode() + middle for index in range(choices)]
        self._after = (
            (b'},"logprobs":null' if head.chat else b',"logprobs":null')
            + b',"finish_reason":null}]'
            + (b',"usage":null}' if include_usage else b"}")
            + b"\n\n"
        )

    def first(self, index: int) -> bytes:
        """What a choice begins with: a chat's role. Text completions have no such chunk."""
        if not self._chat:
            return b""
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def output(self, index: int, output: Output) -> bytes:
        """New text; empty where there is nothing to show yet."""
        if (self._logprobs or self._token_ids) and output.tokens:
            piece = {**self._piece(output.text), **self._ids(output.token_ids)}
            return self._chunk(index, piece, self._logprobs_json(index, output.tokens) if self._logprobs else None)
        if not output.text:
            return b""
        return self._before[index] + _encode(output.text) + self._after

    def finish(self, index: int, finish: Finish) -> bytes:
        """The last chunk of a choice."""
        piece: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        return self._chunk(index, {**piece, **self._ids([])}, None, finish)

    def usage(self, usages: Sequence[Usage]) -> bytes:
        """The chunk without choices, for who asked for it."""
        return event({**self._fields, "choices": [], "usage": usage_json(usages)}) if self._tail else b""

    def _piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}} if self._chat else {"text": text}

    def _ids(self, ids: list[int]) -> dict[str, Any]:
        return {"token_ids": ids} if self._token_ids else {}

    def _logprobs_json(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        return chat_logprobs(tokens) if self._chat else self._legacy[index].add(tokens)

    def _chunk(
        self, index: int, piece: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: Finish | None = None
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            **piece,
            "logprobs": logprobs,
            "finish_reason": None if finish is None else str(finish.reason),
        }
        if finish is not None:
            choice["stop_reason"] = stop_reason(finish, self._named)
        return event({**self._fields, "choices": [choice], **self._tail})


class Whole:
    """Gathers an answer that is sent in one piece."""

    def __init__(self, choices: int, *, logprobs: bool, token_ids: bool = False) -> None:
        self._logprobs, self._token_ids = logprobs, token_ids
        self._texts: list[list[str]] = [[] for _ in range(choices)]
        self._tokens: list[list[Token]] = [[] for _ in range(choices)]
        self._ends: dict[int, Finish] = {}

    def add(self, index: int, part: Output | Finish) -> None:
        if isinstance(part, Finish):
            self._ends[index] = part
        else:
            self._texts[index].append(part.text)
            if self._logprobs or self._token_ids:
                self._tokens[index] += part.tokens

    def json(self, head: Head, named: frozenset[int]) -> bytes:
        """The response's body; every choice has ended."""
        choices = []
        for index, (texts, tokens) in enumerate(zip(self._texts, self._tokens, strict=True)):
            finish, text = self._ends[index], "".join(texts)
            message = {"message": {"role": "assistant", "content": text, "refusal": None}}
            ids = {"token_ids": [token.id for token in tokens]} if self._token_ids else {}
            shape = chat_logprobs if head.chat else CompletionLogprobs().add
            choices.append(
                {
                    "index": index,
                    **(message if head.chat else {"text": text}),
                    **ids,
                    "logprobs": shape(tokens) if self._logprobs else None,
                    "finish_reason": str(finish.reason),
                    "stop_reason": stop_reason(finish, named),
                }
            )
        return _encode(
            {
                "id": head.id,
                "object": "chat.completion" if head.chat else "text_completion",
                "created": head.created,
                "model": head.model,
                "choices": choices,
                "usage": usage_json([self._ends[index].usage for index in range(len(choices))]),
            }
        )
