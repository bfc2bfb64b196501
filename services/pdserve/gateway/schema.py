"""Request bodies, as OpenAI documents them, with vLLM's extra fields. A field that is not here is refused, in `parse`.

A field that is null counts as left out. Ranges are the router's to check, so that both APIs refuse the same values;
only OpenAI's own are here. A list is left at its first wrong item: telling millions would take minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from pdserve.core.sampling import MAX_LOGIT_BIAS

MAX_INT32 = 2**31 - 1
# OpenAI's limits.
MAX_TEMPERATURE = 2.0
MAX_METADATA = 16
# More than anybody's conversation has, and few enough to be looked at in a moment.
MAX_MESSAGES = 16384
# How vLLM joins the parts of a content for templates that take text.
PART_SEPARATOR = "\n"
# Who a message may be from, and who else if there were tools.
ROLES = ("system", "developer", "user", "assistant")
TOOL_ROLES = ("tool", "function")

Item = TypeVar("Item")
Many = Annotated[list[Item], Field(fail_fast=True)]


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _by_token(value: Any) -> Any:
    """JSON has no integer keys."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LOGIT_BIAS:
        raise PydanticCustomError("bias", f"at most {MAX_LOGIT_BIAS} entries, got {len(value)}")
    found = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_INT32):
            raise PydanticCustomError("token_id", "keys must be token ids")
        if type(bias) not in (int, float):
            raise PydanticCustomError("bias", "values must be numbers")
        found[int(key)] = bias
    return found


def _role(value: str) -> str:
    if value in TOOL_ROLES:
        raise PydanticCustomError("unsupported", "messages of tools are not supported yet")
    if value not in ROLES:
        raise PydanticCustomError("role", f"must be one of {', '.join(ROLES)}")
    return value


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise PydanticCustomError("metadata", f"at most {MAX_METADATA} entries, got {len(value)}")
    return value


def _within(least: float, most: float) -> Callable[[float], float]:
    """A check of a number, in the router's words."""

    def check(value: float) -> float:
        if not least <= value <= most:
            raise PydanticCustomError("range", f"must be in [{least:g}, {most:g}], got {value:g}")
        return value

    return check


def _content(value: Any) -> Any:
    """Text, or the text of a list of text parts."""
    if isinstance(value, str):
        return value
    if value is None:
        raise PydanticCustomError("unsupported", "a message without text calls tools, which are not supported yet")
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("content", "must be text, or a list of text parts")
    for part in value:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise PydanticCustomError("content", "a part must be an object with a type")
        if part["type"] != "text":
            raise PydanticCustomError("unsupported", "only parts of type text are supported yet")
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise PydanticCustomError("content", "a text part has type and text, and nothing else")
    return PART_SEPARATOR.join(part["text"] for part in value)


def _is_ids(value: Any) -> bool:
    return bool(value) and all(type(item) is int and 0 <= item <= MAX_INT32 for item in value)


def _prompt(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value) or _is_ids(value):
            return value
        if all(isinstance(item, list) and _is_ids(item) for item in value):
            return value
    raise PydanticCustomError("prompt", "must be a text, token ids, or a list of texts or of token ids")


def _signed_seed(value: int | None) -> int | None:
    """OpenAI's seeds are signed, the router's are not: the same 64 bits."""
    if value is not None and not -(2**63) <= value < 2**64:
        raise PydanticCustomError("seed", "must be an integer of 64 bits")
    return None if value is None else value % 2**64


Texts = Annotated[Many[str], BeforeValidator(_texts)]
Role = Annotated[str, AfterValidator(_role)]
Content = Annotated[str, BeforeValidator(_content)]
# Checked by hand: of a union pydantic would tell each member's complaint.
Prompts = Annotated[Any, BeforeValidator(_prompt)]
Seed = Annotated[int, AfterValidator(_signed_seed)]
LogitBias = Annotated[dict[int, float], BeforeValidator(_by_token)]
Count = Annotated[int, Field(ge=0, le=MAX_INT32)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
Metadata = Annotated[dict[str, str], BeforeValidator(_few)]
Temperature = Annotated[float, AfterValidator(_within(0.0, MAX_TEMPERATURE))]


class Body(BaseModel):
    """What every request body has."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)

    model: str | None = None


class Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: Role
    content: Content


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    include_usage: bool | None = None


class GenerateBody(Body):
    """What chat and text completions share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    stop: Texts | None = None
    max_tokens: Count | None = None
    # They name who asks and why; nothing about the answer follows from them.
    user: str | None = None
    metadata: Metadata | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # vLLM's.
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    stop_token_ids: Many[TokenId] | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: Annotated[int, Field(ge=-MAX_INT32, le=MAX_INT32)] | None = None


class ChatBody(GenerateBody):
    """POST /v1/chat/completions."""

    messages: Annotated[Many[Message], Field(max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None


class CompletionBody(GenerateBody):
    """POST /v1/completions."""

    prompt: Prompts
    logprobs: Count | None = None
    # vLLM's.
    return_token_ids: bool | None = None


class TokenizeBody(Body):
    """POST /tokenize: `prompt` or `messages`."""

    prompt: str | None = None
    messages: Annotated[Many[Message], Field(max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: Many[TokenId]
