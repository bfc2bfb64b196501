"""A request's body: what is taken, and how each mistake is named."""

from __future__ import annotations

import json
import time
from difflib import get_close_matches
from typing import Any

import pytest

from pdserve.gateway.errors import ApiError
from pdserve.gateway.parse import parse
from pdserve.gateway.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatBody:
    return parse(ChatBody, json.dumps({"messages": MESSAGES, **fields}).encode())


def completion(**fields: Any) -> CompletionBody:
    return parse(CompletionBody, json.dumps({"prompt": "hi", **fields}).encode())


def refusal(kind: Any, body: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        parse(kind, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert error.value.status == 400
    return error.value


def test_every_documented_field_is_taken() -> None:
    """OpenAI's and vLLM's, with values as their clients send them."""
    body = chat(
        model="m",
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        temperature=1,  # an integer where a float is meant
        top_p=0.5,
        frequency_penalty=-1.5,
        presence_penalty=0,
        logit_bias={"7": -100, "319": 1.5},
        seed=-1,
        stop="\n",
        max_completion_tokens=5,
        logprobs=True,
        top_logprobs=3,
        user="u",
        metadata={"a": "b"},
        safety_identifier="s",
        prompt_cache_key="k",
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.1,
        ignore_eos=True,
        min_tokens=1,
        stop_token_ids=[3],
        skip_special_tokens=False,
        cache_salt="salt",
        priority=-2,
        n=1,
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        store=False,
    )
    assert body.logit_bias == {7: -100.0, 319: 1.5}
    assert (body.seed, body.stop, body.top_k) == (2**64 - 1, ["\n"], -1)


def test_null_is_left_out() -> None:
    """Clients write null for what they do not set, in what is served and in what is not."""
    fields = [*ChatBody.model_fields, "n", "tools", "response_format", "audio", "reasoning_effort"]
    body = chat(**{name: None for name in fields if name != "messages"})
    assert body.model_dump(exclude={"messages"}, include=set(ChatBody.model_fields), exclude_none=True) == {}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        ("", ""),
        ([{"type": "text", "text": "one"}], "one"),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
    ],
)
def test_content_is_text_or_text_parts(content: Any, text: str) -> None:
    assert chat(messages=[{"role": "user", "content": content}]).messages[0].content == text


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "unsupported_parameter"),
        (5, "invalid_value"),
        ([], "invalid_value"),
        (["text"], "invalid_value"),
        ([{"type": "text"}], "invalid_value"),
        ([{"type": "text", "text": "a", "cache_control": {}}], "invalid_value"),
        ([{"type": "image_url", "image_url": {"url": "data:"}}], "unsupported_parameter"),
        ([{"type": "input_audio", "input_audio": {}}], "unsupported_parameter"),
    ],
)
def test_other_content_is_refused_by_its_place(content: Any, code: str) -> None:
    error = refusal(ChatBody, {"messages": [*MESSAGES, {"role": "user", "content": content}]})
    assert (error.param, error.code) == ("messages[1].content", code)


def test_an_answers_message_may_be_sent_back() -> None:
    """As the clients dump it: with everything that is empty in it."""
    message = {"role": "assistant", "content": "hello", "refusal": None, "annotations": [], "audio": None}
    body = chat(messages=[*MESSAGES, {**message, "function_call": None, "tool_calls": None}, *MESSAGES])
    assert [one.content for one in body.messages] == ["hi", "hello", "hi"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("n", True),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("parallel_tool_calls", True),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("modalities", ["text", "audio"]),
        ("store", True),
        ("reasoning_effort", "high"),
        ("echo", True),
        ("service_tier", "flex"),
        ("structured_outputs", {"regex": "a"}),
        ("chat_template", "x"),
    ],
)
def test_what_a_chat_cannot_have_yet_is_refused_by_name(field: str, value: Any) -> None:
    error = refusal(ChatBody, {"messages": MESSAGES, field: value})
    assert (error.param, error.code) == (field, "unsupported_parameter")
    assert "not supported yet" in error.message


@pytest.mark.parametrize(
    ("field", "value"), [("n", 2), ("best_of", 2), ("echo", True), ("suffix", "end"), ("prompt_logprobs", 1)]
)
def test_what_a_completion_cannot_have_yet_is_refused_by_name(field: str, value: Any) -> None:
    error = refusal(CompletionBody, {"prompt": "a", field: value})
    assert (error.param, error.code) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": MESSAGES, "max_token": 1}, "max_token", "did you mean 'max_tokens'?"),
        ({"messages": MESSAGES, "stop_sequences": ["x"]}, "stop_sequences", "did you mean 'stop'?"),
        ({"messages": MESSAGES, "zzz": 1}, "zzz", "no such field"),
        ({"messages": [{**MESSAGES[0], "nme": "x"}]}, "messages[0].nme", "did you mean 'name'?"),
        ({"messages": MESSAGES, "stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "no such"),
    ],
)
def test_unknown_fields_are_refused_with_the_nearest_known_one(body: Any, param: str, words: str) -> None:
    error = refusal(ChatBody, body)
    assert (error.param, error.code) == (param, "unknown_parameter")
    assert words in error.message


def test_a_chats_limit_is_not_taken_for_another_field() -> None:
    """By its letters max_completion_tokens is as near to min_tokens."""
    error = refusal(CompletionBody, {"prompt": "a", "max_completion_tokens": 1})
    assert error.message.endswith("did you mean 'max_tokens'?")


@pytest.mark.parametrize(
    ("name", "near"),
    [("x" * 1_000_000, ""), ("max_tokens" + "s" * 1_000_000, ""), ("prompt_cache_key" + "s" * 3, "prompt_cache_key")],
)
def test_a_long_name_is_cut_before_it_is_looked_at(name: str, near: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matching takes time that grows with the name's length, and a name may be as long as the body."""
    looked_at: list[str] = []

    def match(word: str, *rest: Any, **options: Any) -> list[str]:
        looked_at.append(word)
        return get_close_matches(word, *rest, **options)

    monkeypatch.setattr("pdserve.gateway.parse.get_close_matches", match)
    error = refusal(ChatBody, {"messages": MESSAGES, name: 1})
    assert looked_at == [name[:100]]
    assert (error.param, error.code) == (name[:100], "unknown_parameter")
    assert error.message == f"{name[:100]}: there is no such field" + (f"; did you mean {near!r}?" if near else "")


def test_a_long_name_in_a_path_is_cut() -> None:
    error = refusal(ChatBody, {"messages": MESSAGES, "metadata": {"k" * 1_000_000: 1}})
    assert error.param == "metadata." + "k" * 100
    assert error.message == f"{error.param}: input should be a valid string"


@pytest.mark.parametrize("key", ["2147483648", "4294967296", "9999999999", "0" * 11])
def test_a_bias_for_what_is_no_token_id_is_refused(key: str) -> None:
    error = refusal(ChatBody, {"messages": MESSAGES, "logit_bias": {key: 1}})
    assert (error.param, error.code, error.message) == (
        "logit_bias",
        "invalid_value",
        "logit_bias: keys must be token ids",
    )


def test_a_bias_for_the_last_token_id_is_taken() -> None:
    assert chat(logit_bias={"2147483647": 1, "0": 2}).logit_bias == {2**31 - 1: 1.0, 0: 2.0}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": "hi"}, "messages"),
        ({"messages": MESSAGES, "temperature": "hot"}, "temperature"),
        ({"messages": MESSAGES, "temperature": True}, "temperature"),
        ({"messages": MESSAGES, "max_tokens": 1.5}, "max_tokens"),
        ({"messages": MESSAGES, "max_tokens": -1}, "max_tokens"),
        ({"messages": MESSAGES, "stream": "yes"}, "stream"),
        ({"messages": MESSAGES, "stop": 5}, "stop"),
        ({"messages": MESSAGES, "stop": [5]}, "stop[0]"),
        ({"messages": MESSAGES, "seed": 2**64}, "seed"),
        ({"messages": MESSAGES, "logit_bias": {"a": 1}}, "logit_bias"),
        ({"messages": MESSAGES, "logit_bias": {"-1": 1}}, "logit_bias"),
        ({"messages": MESSAGES, "top_k": -2}, "top_k"),
        ({"messages": MESSAGES, "priority": 2**31}, "priority"),
        ({"messages": MESSAGES, "metadata": {"a": 1}}, "metadata.a"),
        ({"messages": MESSAGES, "temperature": 2.01}, "temperature"),
        ({"messages": MESSAGES, "temperature": -0.01}, "temperature"),
        ({"messages": MESSAGES, "logit_bias": {"1": "a"}}, "logit_bias"),
        ({"messages": MESSAGES, "logit_bias": {"1": True}}, "logit_bias"),
        ({"messages": MESSAGES, "logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"messages": MESSAGES, "metadata": {str(number): "a" for number in range(17)}}, "metadata"),
        ({"messages": MESSAGES * 16385}, "messages"),
    ],
)
def test_wrong_types_are_refused_by_name(body: Any, param: str) -> None:
    error = refusal(ChatBody, body)
    assert error.param == param
    assert error.message.startswith(f"{param}: ")


@pytest.mark.parametrize("body", [b"", b"{", b"nonsense", b'"text"', b"[]", b"\xff", b'{"prompt": NaN}'])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    assert refusal(CompletionBody, body).kind == "invalid_request_error"


def test_infinity_is_no_number_here() -> None:
    assert refusal(CompletionBody, b'{"prompt": "a", "temperature": Infinity}').param == "temperature"


@pytest.mark.parametrize("temperature", [0, 0.5, 2])
def test_temperatures_that_openai_has(temperature: float) -> None:
    assert chat(temperature=temperature).temperature == temperature


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_roles_that_a_message_may_have(role: str) -> None:
    assert chat(messages=[{"role": role, "content": "a"}]).messages[0].role == role


@pytest.mark.parametrize("kind", [ChatBody, TokenizeBody])
@pytest.mark.parametrize(
    ("role", "code", "words"),
    [
        ("robot", "invalid_value", "must be one of system, developer, user, assistant"),
        ("User", "invalid_value", "must be one of"),
        ("", "invalid_value", "must be one of"),
        ("tool", "unsupported_parameter", "not supported yet"),
        ("function", "unsupported_parameter", "not supported yet"),
    ],
)
def test_a_role_that_nobody_has_is_refused(kind: Any, role: str, code: str, words: str) -> None:
    """A template would make of it what it likes."""
    error = refusal(kind, {"messages": [*MESSAGES, {"role": role, "content": "a"}]})
    assert (error.param, error.code) == ("messages[1].role", code)
    assert words in error.message


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("echo", True, "other than false"),
        ("tool_choice", "required", 'other than "none" or "auto"'),
        ("response_format", {"type": "json_object"}, 'other than {"type":"text"}'),
        ("n", 2, "other than 1"),
    ],
)
def test_what_would_be_taken_is_said_as_json_has_it(field: str, value: Any, words: str) -> None:
    error = refusal(ChatBody, {"messages": MESSAGES, field: value})
    assert error.message == f"{field}: not supported yet, {words}"


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (ChatBody, b'{"messages":[' + b"{}," * 1_000_000 + b"{}]}", "messages[0].role"),
        (ChatBody, b'{"messages":[' + b"5," * 1_000_000 + b"5]}", "messages[0]"),
        (CompletionBody, b'{"prompt":"a","stop":[' + b"5," * 1_000_000 + b"5]}", "stop[0]"),
        (CompletionBody, b'{"prompt":"a","stop_token_ids":[' + b"-1," * 1_000_000 + b"5]}", "stop_token_ids[0]"),
        (DetokenizeBody, b'{"tokens":[' + b"-1," * 1_000_000 + b"5]}", "tokens[0]"),
    ],
    ids=["messages", "no messages", "stop", "stop_token_ids", "tokens"],
)
def test_a_million_mistakes_cost_no_more_than_one(kind: Any, body: bytes, param: str) -> None:
    """Each told by itself they take half a minute, in which nobody else is served, and gigabytes."""
    begun = time.process_time()
    error = refusal(kind, body)
    assert error.param == param and len(error.message) < 200
    assert time.process_time() - begun < 5.0


def test_a_refusal_does_not_repeat_the_prompt() -> None:
    secret = "very secret prompt"
    for body in ({"prompt": [secret, 5]}, {"prompt": {"text": secret}}, {"prompt": "a", "user": [secret]}):
        assert secret not in refusal(CompletionBody, body).message


@pytest.mark.parametrize("prompt", ["", "text", ["a", "b"], [1, 2, 3], [[1], [2, 3]]])
def test_prompts_of_every_shape(prompt: Any) -> None:
    assert completion(prompt=prompt).prompt == prompt


@pytest.mark.parametrize("prompt", [None, [], [[]], 5, [1, "a"], ["a", [1]], [True], [-1], [1.0], {"a": 1}, [[1], []]])
def test_prompts_of_no_shape(prompt: Any) -> None:
    assert refusal(CompletionBody, {"prompt": prompt}).param == "prompt"


def test_tokenizer_bodies() -> None:
    assert parse(TokenizeBody, b'{"prompt": "a", "add_generation_prompt": true}').prompt == "a"
    assert refusal(TokenizeBody, {"messages": MESSAGES, "add_generation_prompt": False}).code == "unsupported_parameter"
    assert parse(DetokenizeBody, b'{"tokens": [1, 2]}').tokens == [1, 2]
    assert refusal(DetokenizeBody, {"tokens": [-1]}).param == "tokens[0]"
