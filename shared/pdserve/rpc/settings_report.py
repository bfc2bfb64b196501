"""Settings for people: what is wrong with them, and what is in force and why."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel, ByteSize, SecretBytes, SecretStr, ValidationError

from pdserve.rpc.settings_sources import FLAG_ONLY, Given, Origin, option, variable

MASK = "********"
_PASSWORD = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_DEFAULT = Origin("default", "default")
# pydantic's words where ours are plainer.
_PLAINLY = {
    "byte_size": "is not a size such as 512MiB or 4GiB",
    "byte_size_unit": "is not a size such as 512MiB or 4GiB",
    "list_type": "must be a list",
}


@dataclass(frozen=True, slots=True)
class Report:
    """The settings in force: name, value for people, and where it was said. Secrets are masked."""

    rows: tuple[tuple[str, Any, Origin], ...]

    @classmethod
    def of(cls, settings: BaseModel, given: Given) -> Self:
        names = [name for name in type(settings).model_fields if name not in FLAG_ONLY]
        return cls(tuple((name, getattr(settings, name), given.origins.get(name, _DEFAULT)) for name in names))

    @staticmethod
    def schema(model: type[BaseModel]) -> str:
        """JSON schema of the YAML file, for editors."""
        schema = model.model_json_schema(mode="validation")
        properties = schema["properties"]
        for name in (*FLAG_ONLY, "config"):
            properties.pop(name, None)
        schema["properties"] = {name.replace("_", "-"): facts for name, facts in properties.items()}
        schema.pop("required", None)  # flags and variables may say those
        return json.dumps(schema, indent=2)

    def table(self) -> str:
        """Three columns: setting, value, source."""
        cells = [("setting", "value", "from")]
        cells += [(name.replace("_", "-"), show(value), origin.at) for name, value, origin in self.rows]
        widths = [max(len(row[column]) for row in cells) for column in (0, 1)]
        lines = (f"{name:<{widths[0]}}  {value:<{widths[1]}}  {at}" for name, value, at in cells)
        return "\n".join(line.rstrip() for line in lines)

    def json(self) -> str:
        """{"port": {"value": ..., "source": "flag" | "env" | "file" | "default", "at": ...}, ...}"""
        return json.dumps(
            {
                name.replace("_", "-"): {"value": _plain(value), "source": origin.source, "at": origin.at}
                for name, value, origin in self.rows
            }
        )


def explain(error: ValidationError, given: Given) -> Iterator[str]:
    """A line for each thing that is wrong, with the place where it was said."""
    for detail in error.errors():
        name = str(detail["loc"][0]) if detail["loc"] else ""
        if detail["type"] == "missing":
            if name not in given.meant:  # a misspelt one has been told already
                yield f"{name.replace('_', '-')} is required: set it with {option(name)}, {variable(name)} or in a file"
            continue
        message = _PLAINLY.get(detail["type"]) or _own_words(detail)
        if detail["type"] in _PLAINLY:
            message = f"{detail['input']!r} {message}"
        origin = given.origins.get(name)
        place = f" ({origin.at})" if origin else ""
        yield from (f"{name.replace('_', '-')}: {line}{place}" if name else line for line in message.splitlines())


def _own_words(detail: Any) -> str:
    """The message, without what pydantic puts in front of ours."""
    cause = detail.get("ctx", {}).get("error")
    return str(cause) if isinstance(cause, ValueError) else str(detail["msg"])


def show(value: Any) -> str:
    """A value for people: sizes with their unit, nothing as "-", passwords masked."""
    if value is None or value == "" or value == []:
        return "-"
    if isinstance(value, ByteSize):
        return f"{int(value)} ({value.human_readable()})" if value >= 1024 else str(int(value))
    if isinstance(value, list):
        return ", ".join(map(show, value))
    return str(_plain(value))


def _plain(value: Any) -> Any:
    """A value as JSON has it, secrets masked."""
    if isinstance(value, SecretStr | SecretBytes):
        return MASK
    if isinstance(value, bool | int | float) or value is None:
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _PASSWORD.sub(MASK, str(value))
