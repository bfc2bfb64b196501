"""Answers as JSON: chunks that OpenAI's own types accept, and whole answers that say the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from pdserve.client import Finish, FinishReason, Output, Stages, Token, Usage
from pdserve.gateway.chunks import Chunks, Head, Whole, stop_reason

USAGE = Usage(7, 2, 4, 0, 0, Stages(0, 0, 0, 0, 0), 0, "p", "d")
STOP = Finish(FinishReason.STOP, USAGE, stop_token_id=9)
TOKENS = (Token(1, -0.5, ((1, -0.5), (2, -1.5)), b"a", (b"a", b"\xf0")), Token(3, -2.0, (), b"\x9f", ()))
NASTY = 'quote " backslash \\ newline \n nul \x00 line separator \u2028 emoji \U0001f600'


def head(chat: bool) -> Head:
    return Head(chat, "req-1", 12, "tiny")


def chunks(chat: bool, choices: int = 1, **options: Any) -> Chunks:
    settings = {"logprobs": False, "include_usage": False, "named": frozenset({5}), **options}
    return Chunks(head(chat), choices, **settings)


def read(data: bytes) -> Any:
    """One event, framed as server-sent events are."""
    assert data.startswith(b"data: ") and data.endswith(b"\n\n") and data.count(b"\n") == 2
    return json.loads(data[6:])


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
@pytest.mark.parametrize("include_usage", [True, False], ids=["usage", "no-usage"])
def test_the_quick_chunk_is_the_careful_one(chat: bool, include_usage: bool) -> None:
    """The bytes put together by hand parse to what the general way makes, for text with everything in it."""
    writer = chunks(chat, 2, include_usage=include_usage)
    quick = read(writer.output(1, Output(0, (Token(1),), NASTY)))
    careful = read(writer._chunk(1, writer._piece(NASTY)))
    assert quick == careful
    assert quick["choices"][0]["index"] == 1
    assert ("usage" in quick) == include_usage


def test_a_chat_stream_in_order() -> None:
    """Role, text, finish, usage without choices: each as OpenAI's client types it."""
    writer = chunks(True, include_usage=True)
    parts = [
        writer.first(0),
        writer.output(0, Output(0, (Token(1),), "a")),
        writer.finish(0, STOP),
        writer.usage([USAGE]),
    ]
    first, text, finish, usage = (ChatCompletionChunk.model_validate(read(part)) for part in parts)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert (text.choices[0].delta.content, text.choices[0].finish_reason) == ("a", None)
    assert (finish.choices[0].delta.content, finish.choices[0].finish_reason) == (None, "stop")
    assert usage.choices == [] and usage.usage is not None
    assert (usage.usage.prompt_tokens, usage.usage.completion_tokens, usage.usage.total_tokens) == (7, 2, 9)
    assert usage.usage.prompt_tokens_details is not None and usage.usage.prompt_tokens_details.cached_tokens == 4
    assert len({chunk.id for chunk in (first, text, finish, usage)}) == 1


def test_nothing_to_show_is_no_chunk() -> None:
    """Half a character, or the beginning of a stop string; with logprobs the tokens are shown all the same."""
    held = Output(0, (Token(1, -1.0, (), b"\xf0", ()),), "")
    assert chunks(True).output(0, held) == b""
    shown = read(chunks(True, logprobs=True).output(0, held))["choices"][0]
    assert shown["delta"] == {"content": ""} and len(shown["logprobs"]["content"]) == 1


def test_token_ids_are_in_every_chunk() -> None:
    """Also of tokens that add no text yet; logprobs stay what they are without them."""
    writer = chunks(False, token_ids=True)
    held = read(writer.output(0, Output(0, (Token(1), Token(7)), "")))["choices"][0]
    assert (held["text"], held["token_ids"], held["logprobs"]) == ("", [1, 7], None)
    assert read(writer.finish(0, STOP))["choices"][0]["token_ids"] == []
    both = read(chunks(False, token_ids=True, logprobs=True).output(0, Output(0, TOKENS, "a")))["choices"][0]
    assert both["token_ids"] == [1, 3] and both["logprobs"]["token_logprobs"] == [-0.5, -2.0]
    whole = Whole(1, logprobs=False, token_ids=True)
    for part in (Output(0, TOKENS, "a"), STOP):
        whole.add(0, part)
    choice = json.loads(whole.json(head(False), frozenset()))["choices"][0]
    assert (choice["token_ids"], choice["logprobs"]) == ([1, 3], None)


def test_text_chunks_have_no_role() -> None:
    writer = chunks(False)
    assert writer.first(0) == b"" and writer.usage([USAGE]) == b""
    finish = Completion.model_validate(read(writer.finish(0, STOP)))
    assert (finish.choices[0].text, finish.choices[0].finish_reason) == ("", "stop")


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        (STOP, None),  # the model's own end of sequence
        (Finish(FinishReason.STOP, USAGE, stop_token_id=5), 5),
        (Finish(FinishReason.STOP, USAGE, stop_string="END"), "END"),
        (Finish(FinishReason.LENGTH, USAGE), None),
    ],
)
def test_stop_reason(finish: Finish, reason: Any) -> None:
    assert stop_reason(finish, frozenset({5})) == reason


def test_a_whole_chat() -> None:
    whole = Whole(1, logprobs=True)
    for part in (Output(0, TOKENS, "a"), Output(2, (), "b"), STOP):
        whole.add(0, part)
    answer = ChatCompletion.model_validate_json(whole.json(head(True), frozenset()))
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("ab", "stop")
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [(entry.token, entry.bytes, entry.logprob) for entry in logprobs.content] == [
        ("a", [97], -0.5),
        ("\\x9f", [159], -2.0),
    ]
    assert [entry.token for entry in logprobs.content[0].top_logprobs] == ["a", "\\xf0"]


def test_a_whole_completion_with_several_choices() -> None:
    """Usage is the sum; choices stand in the order of their prompts, however they ended."""
    whole = Whole(2, logprobs=False)
    for index, part in ((1, Output(0, (), "y")), (1, STOP), (0, Output(0, (), "x")), (0, STOP)):
        whole.add(index, part)
    answer = Completion.model_validate_json(whole.json(head(False), frozenset()))
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "x"), (1, "y")]
    assert answer.usage is not None and answer.usage.total_tokens == 18
