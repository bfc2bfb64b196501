"""A request's body: read within limits, checked, and refused by the name of the field that is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from pdserve.gateway import not_yet
from pdserve.gateway.errors import ApiError, invalid
from pdserve.gateway.schema import Body, ChatBody, CompletionBody, Message, StreamOptions, TokenizeBody

Parsed = TypeVar("Parsed", bound=Body)

# Characters of a name that are looked at, told and logged. A client may send one as long as its body.
_NAME = 100

# What other APIs, or another route here, call a field; by its letters it would be taken for something else.
_ELSEWHERE = {"max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens", "stop_sequences": "stop"}

_NOT_YET: dict[type[BaseModel], not_yet.Neutral] = {
    ChatBody: not_yet.CHAT,
    CompletionBody: not_yet.COMPLETION,
    TokenizeBody: not_yet.TOKENIZE,
    Message: not_yet.MESSAGE,
    StreamOptions: not_yet.STREAM_OPTIONS,
}


async def read_body(request: Request, most: int, seconds: float) -> bytes:
    """The body, of at most `most` bytes, sent within `seconds`. Raises ApiError (408, 413, 415) or ClientDisconnect."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A web page may send other types anywhere without asking; JSON it may not.
        raise ApiError(415, f"the content type must be application/json, got {kind[:100]!r}", code="unsupported_type")
    body, dropped = bytearray(), 0
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                # Past the limit it is read on, to a second one, and thrown away: a connection that is closed with
                # bytes unread loses the answer that says why.
                if len(body) <= most:
                    body += chunk
                elif (dropped := dropped + len(chunk)) > most:
                    break
    except TimeoutError:
        if len(body) <= most:
            raise ApiError(408, f"the body was not here after {seconds:.3g} s", code="body_timeout") from None
    except ClientDisconnect:
        raise ApiError(499, "the client went away", code="disconnected") from None
    if len(body) > most:
        raise ApiError(413, f"the body has more than {most} bytes", code="body_too_large")
    return bytes(body)


def parse(kind: type[Parsed], body: bytes) -> Parsed:
    """A body as `kind`. Raises ApiError (400) that names the first field that is wrong, unknown or not served yet."""
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error) from None
    for path, model in _models(parsed):
        _check_extra(path, model)
    return parsed


def _models(model: BaseModel, path: str = "") -> Iterator[tuple[str, BaseModel]]:
    """A model and those inside it, each with its path."""
    yield path, model
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _models(value, f"{path}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for index, item in enumerate(value):
                yield from _models(item, f"{path}{name}[{index}].")


def _check_extra(path: str, model: BaseModel) -> None:
    kind = type(model)
    neutral = _NOT_YET.get(kind, {})
    for name, value in (model.model_extra or {}).items():
        if name not in neutral:
            name = name[:_NAME]
            near = _nearest(name, [*kind.model_fields, *neutral])
            hint = f"; did you mean {near!r}?" if near else ""
            raise invalid(f"{path}{name}", f"there is no such field{hint}", "unknown_parameter")
        if not not_yet.is_neutral(value, neutral[name]):
            raise invalid(f"{path}{name}", _not_served(neutral[name]), "unsupported_parameter")


def _nearest(name: str, known: list[str]) -> str:
    """The field that is meant, if one is."""
    meant = _ELSEWHERE.get(name, "")
    return meant if meant in known else next(iter(get_close_matches(name, known, n=1)), "")


def _not_served(neutral: tuple[Any, ...]) -> str:
    if not neutral:
        return "not supported yet; leave it out"
    return f"not supported yet, other than {' or '.join(msgspec.json.encode(value).decode() for value in neutral)}"


def _explain(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    param = _path(first["loc"])
    if first["type"] == "json_invalid":
        return invalid(None, f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}", "invalid_json")
    if first["type"] == "missing":
        return invalid(param or None, "is required", "missing_required_parameter")
    if first["type"] == "too_long":
        return invalid(param or None, f"at most {first['ctx']['max_length']} items")
    code = "unsupported_parameter" if first["type"] == "unsupported" else "invalid_value"
    return invalid(param or None, first["msg"][:1].lower() + first["msg"][1:], code)


def _path(location: tuple[int | str, ...]) -> str:
    """``messages[0].content``; each name is cut."""
    path = ""
    for part in location:
        name = f"[{part}]" if isinstance(part, int) else part[:_NAME]
        path += name if isinstance(part, int) or not path else f".{name}"
    return path
