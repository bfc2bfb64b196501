"""From bodies to jobs: what the router is asked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.gateway.errors import ApiError
from pdserve.gateway.parse import parse
from pdserve.gateway.schema import ChatBody, CompletionBody
from pdserve.gateway.translate import Job, chat_job, completion_job

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> Job:
    return chat_job(parse(ChatBody, json.dumps({"messages": MESSAGES, **fields}).encode()))


def completion(prompt: Any = "hi", **fields: Any) -> Job:
    return completion_job(parse(CompletionBody, json.dumps({"prompt": prompt, **fields}).encode()), max_prompts=3)


def refused_param(make: Any, **fields: Any) -> str | None:
    with pytest.raises(ApiError) as error:
        make(**fields)
    assert error.value.status == 400
    return error.value.param


def test_what_is_not_set_is_left_to_the_model() -> None:
    job = chat()
    assert not {name: value for name, value in job.options.items() if value not in (None, "", ())}
    assert (job.prompts, job.stream, job.include_usage, job.logprobs) == ((MESSAGES,), False, False, False)


def test_a_completion_without_a_limit_has_openais() -> None:
    assert completion().options["max_tokens"] == 16
    assert completion(max_tokens=5).options["max_tokens"] == 5


def test_vllms_numbers_become_ours() -> None:
    """Its lower priority is earlier, ours higher; its top_k -1 is all, as 0 is; seeds are the same 64 bits."""
    options = chat(priority=5, top_k=-1, seed=-2).options
    assert (options["priority"], options["top_k"], options["seed"]) == (-5, 0, 2**64 - 2)
    assert chat(top_k=7).options["top_k"] == 7


def test_both_names_of_the_limit() -> None:
    assert chat(max_tokens=4).options["max_tokens"] == 4
    assert chat(max_completion_tokens=4).options["max_tokens"] == 4
    assert chat(max_completion_tokens=4, max_tokens=4).options["max_tokens"] == 4
    assert refused_param(chat, max_completion_tokens=4, max_tokens=5) == "max_tokens"
    assert chat(max_tokens=4).renames["max_tokens"] == "max_tokens"
    assert chat(max_completion_tokens=4).renames["max_tokens"] == "max_completion_tokens"


def test_logprobs_of_both_shapes() -> None:
    assert (chat(logprobs=True).options["logprobs"], chat(logprobs=True).logprobs) == (0, True)
    assert chat(logprobs=True, top_logprobs=2).options["logprobs"] == 2
    assert (chat(logprobs=False).options.get("logprobs"), chat(logprobs=False).logprobs) == (None, False)
    assert refused_param(chat, top_logprobs=2) == "top_logprobs"
    assert (completion(logprobs=0).options["logprobs"], completion(logprobs=0).logprobs) == (0, True)
    assert completion().logprobs is False


def test_stream_options_need_a_stream() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={}).include_usage
    assert refused_param(chat, stream_options={"include_usage": True}) == "stream_options"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        ([1, 2], ([1, 2],)),
        (["a", "b"], ("a", "b")),
        ([[1], [2, 3]], ([1], [2, 3])),
        (["a"], ("a",)),
    ],
)
def test_prompts_are_told_apart_by_shape(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert completion(prompt).prompts == prompts


def test_prompts_have_a_limit() -> None:
    assert refused_param(completion, prompt=["a"] * 4) == "prompt"


def test_an_empty_conversation() -> None:
    assert refused_param(chat, messages=[]) == "messages"


def test_named_stop_tokens() -> None:
    assert chat(stop_token_ids=[3, 4]).stop_token_ids == {3, 4}
    assert chat().stop_token_ids == frozenset()
