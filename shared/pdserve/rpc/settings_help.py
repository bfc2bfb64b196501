"""``--help`` of settings, for people: what a value is, instead of the Python type that it becomes."""

from __future__ import annotations

import re
from argparse import Action, HelpFormatter

_KINDS = {"int": "N", "float": "NUMBER", "str": "TEXT", "ByteSize": "SIZE", "Path": "PATH"}
# By the end of a field's name, where that says more than the type.
_NUMBERS = {"seconds": "SECONDS", "ms": "MILLISECONDS", "percentile": "PERCENT", "port": "PORT"}
_TEXTS = {
    "host": "HOST",
    "endpoint": "HOST:PORT",
    "worker": "HOST:PORT",
    "router": "HOST:PORT",
    "cache": "HOST:PORT",
    "model": "MODEL",
    "dir": "FOLDER",
}
_NO_DEFAULT = re.compile(r" \((default: (None|\[\])?|default factory: [^)]*)\)$")


def metavar(name: str, kind: str) -> str:
    """What stands for the value of a field `name` of type `kind`, such as ``list[int]``. Choices stay what they are."""
    kind = kind.removeprefix("list[").removesuffix("]")
    if kind not in _KINDS:
        return kind
    endings = _TEXTS if kind in ("str", "Path") else _NUMBERS
    return endings.get(re.split("[_-]", name)[-1], _KINDS[kind])


class Help(HelpFormatter):
    """Leaves out defaults that say nothing: None, and lists that are empty or made when asked for."""

    def _get_help_string(self, action: Action) -> str:
        return _NO_DEFAULT.sub("", action.help or "")

    def _format_args(self, action: Action, default_metavar: str) -> str:
        if isinstance(action.metavar, str) and action.option_strings:
            return metavar(action.dest, action.metavar)
        return super()._format_args(action, default_metavar)
