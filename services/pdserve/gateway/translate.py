"""From a request's body to what the router is asked, and from the router's field names back to the body's. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.client import GenerateOptions, Prompt
from pdserve.gateway.errors import invalid
from pdserve.gateway.schema import ChatBody, CompletionBody, GenerateBody, Message

# What OpenAI documents for text completions that name no limit.
DEFAULT_COMPLETION_TOKENS = 16
_SAME = (
    *("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("logit_bias", "seed", "min_tokens", "ignore_eos", "skip_special_tokens"),
)


@dataclass(frozen=True, slots=True)
class Job:
    """What one HTTP request asks for: an answer to each prompt, with the same options.

    `token_ids`: tell the ids of the answer's tokens. `renames` maps the router's field names to those of the body.
    """

    chat: bool
    prompts: tuple[Prompt, ...]
    options: GenerateOptions
    stream: bool
    include_usage: bool
    logprobs: bool
    renames: Mapping[str, str]
    token_ids: bool = False

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that the client itself named as stops."""
        return frozenset(self.options.get("stop_token_ids", ()))


def chat_job(body: ChatBody) -> Job:
    """Raises ApiError for fields that contradict each other."""
    if not body.messages:
        raise invalid("messages", "must not be empty")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "is only allowed where logprobs is true")
    limit_name, limit = "max_tokens", body.max_tokens
    if body.max_completion_tokens is not None:
        if limit not in (None, body.max_completion_tokens):
            raise invalid("max_tokens", f"is {limit}, but max_completion_tokens is {body.max_completion_tokens}")
        limit_name, limit = "max_completion_tokens", body.max_completion_tokens
    options = _options(body)
    options["max_tokens"] = limit
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    return Job(
        chat=True,
        prompts=(conversation(body.messages),),
        options=options,
        stream=bool(body.stream),
        include_usage=_include_usage(body),
        logprobs=bool(body.logprobs),
        renames={"chat": "messages", "max_tokens": limit_name, "logprobs": "top_logprobs", **_RENAMES},
    )


def completion_job(body: CompletionBody, max_prompts: int) -> Job:
    """Raises ApiError for fields that contradict each other, and for too many prompts."""
    prompts = split_prompts(body.prompt)
    if len(prompts) > max_prompts:
        raise invalid("prompt", f"at most {max_prompts} prompts in one request, got {len(prompts)}")
    options = _options(body)
    options["max_tokens"] = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    options["logprobs"] = body.logprobs
    return Job(
        chat=False,
        prompts=prompts,
        options=options,
        stream=bool(body.stream),
        include_usage=_include_usage(body),
        logprobs=body.logprobs is not None,
        renames={"text": "prompt", "token_ids.ids": "prompt", **_RENAMES},
        token_ids=bool(body.return_token_ids),
    )


_RENAMES = {"request_id": "x-request-id"}


def conversation(messages: list[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def split_prompts(prompt: Any) -> tuple[Prompt, ...]:
    """One prompt or several, by their shape (see schema.Prompts): text, ids, texts, or lists of ids."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return (prompt,)
    return tuple(prompt)


def _options(body: GenerateBody) -> GenerateOptions:
    options: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    options["model"] = body.model or ""
    options["stop"] = body.stop or ()
    options["stop_token_ids"] = body.stop_token_ids or ()
    options["top_k"] = 0 if body.top_k == -1 else body.top_k  # both mean all, in vLLM
    options["cache_salt"] = body.cache_salt or ""
    options["priority"] = None if body.priority is None else -body.priority  # vLLM's lower is earlier
    return GenerateOptions(**options)  # type: ignore[no-any-return, typeddict-item]


def _include_usage(body: GenerateBody) -> bool:
    if body.stream_options is None:
        return False
    if not body.stream:
        raise invalid("stream_options", "is only allowed where stream is true")
    return bool(body.stream_options.include_usage)
