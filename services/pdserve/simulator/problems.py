"""What is wrong with a plan, in sentences that name its keys as they are written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pdserve.rpc.settings_sources import nearest

LONGEST = 60  # characters of a value that a sentence repeats
# What pydantic calls a mistake: what to say of it. {input} is what was said, other names are the error's own.
_SENTENCES = {
    "missing": "must be said",
    "int_type": "must be a whole number, not {input}",
    "int_parsing": "must be a whole number, not {input}",
    "int_from_float": "must be a whole number, not {input}",
    "float_type": "must be a number, not {input}",
    "float_parsing": "must be a number, not {input}",
    "finite_number": "must be finite, not {input}",
    "bool_type": "must be true or false, not {input}",
    "bool_parsing": "must be true or false, not {input}",
    "string_type": "must be a text, not {input}",
    "path_type": "must be the name of a file, not {input}",
    "list_type": "must be a list, not {input}",
    "tuple_type": "must be a list, not {input}",
    "dict_type": "must hold keys, not {input}",
    "model_type": "must hold keys, not {input}",
    "too_long": "must have {max_length} values, not {actual_length}",
    "greater_than": "must be above {gt:g}, not {input}",
    "greater_than_equal": "must be {ge:g} or more, not {input}",
    "less_than": "must be below {lt:g}, not {input}",
    "less_than_equal": "must be {le:g} or less, not {input}",
    "literal_error": "must be {expected}, not {input}",
}


def sentences(error: ValidationError, model: type[BaseModel], kinds: Mapping[str, type[BaseModel] | None]) -> list[str]:
    """One for each problem, in the order of the plan. `kinds` are the tags of tagged unions with their models."""
    return [_sentence(detail, model, kinds) for detail in error.errors(include_url=False)]


def keys(model: type[BaseModel], kinds: Mapping[str, type[BaseModel] | None], path: Iterable[int | str]) -> list[str]:
    """The names that may stand at `path` within `model`."""
    for part in path:
        if part in kinds:
            model = kinds[str(part)] or model
        elif isinstance(part, str) and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation) or model
    return list(model.model_fields)


def unknown(name: str, names: Iterable[str], prefix: str = "") -> str:
    """That there is no such key, and which one is meant."""
    close = nearest(name, names)
    return f"{prefix}{name}: no such key" + (f"; did you mean {prefix}{close}?" if close else "")


def _sentence(detail: ErrorDetails, model: type[BaseModel], kinds: Mapping[str, type[BaseModel] | None]) -> str:
    path = [part for part in detail["loc"] if part not in kinds]
    name = ".".join(map(str, path))
    context: dict[str, Any] = detail.get("ctx", {})
    if detail["type"] == "extra_forbidden":
        prefix = "".join(f"{part}." for part in path[:-1])
        return unknown(str(path[-1]), keys(model, kinds, detail["loc"][:-1]), prefix)
    if detail["type"] == "missing" and isinstance(path[-1], int):
        return f"{'.'.join(map(str, path[:-1]))}: has too few values"
    if detail["type"] == "value_error":
        told = str(context["error"])
    elif template := _SENTENCES.get(detail["type"]):
        told = template.format(input=_plain(detail["input"]), **context)
    else:
        told = detail["msg"].replace("Input should be", "must be")
    return f"{name}: {told}" if name else told


def _plain(value: Any) -> str:
    """A value as a plan has it, not too long."""
    match value:
        case None:
            text = "nothing"
        case bool():
            text = str(value).lower()
        case str() | int() | float():
            text = repr(value)
        case dict():
            text = "keys"
        case _:
            text = "a list"
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that an annotation names, on its own or within a list, an option or Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)
