"""Request bodies, as OpenAI documents them, with vLLM's extra fields. A field that is not here is refused, in `parse`.

A field that is null counts as left out. Ranges are the router's to check, so that both APIs refuse the same values.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

MAX_INT32 = 2**31 - 1
# How vLLM joins the parts of a content for templates that take text.
PART_SEPARATOR = "\n"


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _by_token(value: Any) -> Any:
    """JSON has no integer keys."""
    if not isinstance(value, dict):
        return value
    found = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_INT32):
            raise PydanticCustomError("token_id", "keys must be token ids")
        found[int(key)] = bias
    return found


def _content(value: Any) -> Any:
    """Text, or the text of a list of text parts."""
    if isinstance(value, str):
        return value
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


Texts = Annotated[list[str], BeforeValidator(_texts)]
Content = Annotated[str, BeforeValidator(_content)]
# Checked by hand: of a union pydantic would tell each member's complaint.
Prompts = Annotated[Any, BeforeValidator(_prompt)]
Seed = Annotated[int, AfterValidator(_signed_seed)]
LogitBias = Annotated[dict[int, float], BeforeValidator(_by_token)]
Count = Annotated[int, Field(ge=0, le=MAX_INT32)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]


class Body(BaseModel):
    """What every request body has."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)

    model: str | None = None


class Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: str
    content: Content


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    include_usage: bool | None = None


class GenerateBody(Body):
    """What chat and text completions share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    stop: Texts | None = None
    max_tokens: Count | None = None
    # They name who asks and why; nothing about the answer follows from them.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # vLLM's.
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    stop_token_ids: list[TokenId] | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: Annotated[int, Field(ge=-MAX_INT32, le=MAX_INT32)] | None = None


class ChatBody(GenerateBody):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None


class CompletionBody(GenerateBody):
    """POST /v1/completions."""

    prompt: Prompts
    logprobs: Count | None = None


class TokenizeBody(Body):
    """POST /tokenize: `prompt` or `messages`."""

    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[TokenId]
