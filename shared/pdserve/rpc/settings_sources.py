"""Where settings come from: command line, environment and YAML file, each value with the place it was said in.

Nothing is dropped in silence. A name that no setting has is a problem that names the nearest one.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from pdserve.rpc.setting_names import SETTING_NAMES
from pdserve.rpc.settings_help import Help

ENV_PREFIX = "PDSERVE_"
# Variables that are no service's setting: the client commands' API key and router, the model cache and that of compiled
# kernels, and what the soak takes.
OTHER_VARIABLES = frozenset(
    {
        "PDSERVE_API_KEY",
        "PDSERVE_CACHE",
        "PDSERVE_FUZZ",
        "PDSERVE_KERNELS",
        "PDSERVE_LIFECYCLES",
        "PDSERVE_SEED",
        "PDSERVE_SIM_SEED",
        "PDSERVE_SIM_SEEDS",
        "PDSERVE_TARGET",
    }
)
TEST_PREFIX = "PDSERVE_TEST_"
# Said for one process only: a file or a variable that many share must not say them.
FLAG_ONLY = frozenset({"check_config", "launcher_fd"})
# What vLLM's users may look for, and why it is not here.
NOT_HERE = {
    "api_key": "keys stand in the file that the router's api-keys-file names",
    "chat_template": "the model's own is taken, from its folder",
    "data_parallel_size": "more workers are started instead, and the router spreads requests over them",
    "disable_log_requests": "prompts and answers are never logged",
    "enable_auto_tool_choice": "tools are not served yet",
    "enable_chunked_prefill": "prompts are always computed in chunks of max-num-batched-tokens",
    "enforce_eager": "nothing is captured or compiled, so eager is all there is",
    "kv_cache_dtype": "KV is kept in the model's dtype; kv-transfer-dtype says how it travels",
    "kv_transfer_config": "the router pairs workers by itself; kv-transport says over what KV travels",
    "pipeline_parallel_size": "a worker is one process on one device",
    "quantization": "weights are served as they are",
    "seed": "a request brings its own",
    "swap_space": "KV is not swapped; what is preempted is computed again",
    "tool_call_parser": "tools are not served yet",
    "tokenizer": "the model's own is taken, from its folder",
    "trust_remote_code": "code from a model's folder is never run",
}
_CUTOFF = 0.6
# What Kubernetes puts into the environment for a Service called pdserve-something.
_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_(TCP|UDP)\w*)$")
_SERVICE_URL = re.compile(r"^(tcp|udp)://")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was said: in which source, and at what (``--port``, ``PDSERVE_PORT``, ``router.yaml:3``)."""

    source: Literal["flag", "env", "file", "default"]
    at: str


@dataclass(slots=True)
class Given:
    """What was said: values by field, where each was said, and a sentence for each thing that cannot be.

    `meant` are the fields that a misspelt name probably stands for; `readable` tells whether the command line could be
    read at all, so that what the values lack means something.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    meant: set[str] = field(default_factory=set)
    readable: bool = True

    def take(self, name: str, value: Any, origin: Origin) -> None:
        """Note a value, unless a source of higher rank has said the setting already."""
        if name not in self.values:
            self.values[name], self.origins[name] = value, origin


def gather(model: type[BaseSettings], arguments: Sequence[str], environment: Mapping[str, str], program: str) -> Given:
    """All that was said for `model`: flags over variables over the file that `config` names.

    Ends the process after ``--help``, which names it `program`.
    """
    given = Given()
    _take_flags(given, model, arguments, program)
    _take_environment(given, model.model_fields, environment)
    if path := given.values.get("config"):
        _take_file(given, model.model_fields, Path(str(path)).expanduser())
    return given


def option(name: str) -> str:
    """A field's flag."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """A field's environment variable."""
    return f"{ENV_PREFIX}{name}".upper()


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that a misspelt `name` most resembles, if any does."""
    return next(iter(difflib.get_close_matches(name, sorted(names), n=1, cutoff=_CUTOFF)), None)


def _take_flags(given: Given, model: type[BaseSettings], arguments: Sequence[str], program: str) -> None:
    fields = model.model_fields
    kept = list(_known_words(given, fields, arguments))
    try:
        source: CliSettingsSource[Any] = CliSettingsSource(
            model, cli_prog_name=program, cli_parse_args=kept, cli_exit_on_error=False, formatter_class=Help
        )
        values = source()
    except SettingsError as error:
        given.problems.append(str(error).removeprefix("error parsing CLI: "))
        given.readable = False
        return
    for name, value in values.items():
        given.take(name, value, Origin("flag", option(name)))


def _known_words(given: Given, fields: Mapping[str, FieldInfo], arguments: Sequence[str]) -> Iterator[str]:
    """The words without options that no field has, and without what follows those."""
    known = {option(name): name for name in fields}
    known |= {f"--no{option(name)[1:]}": name for name, info in fields.items() if info.annotation is bool}
    seen: set[str] = set()
    skipping = False
    for word in arguments:
        flag = word.split("=", 1)[0]
        if flag.startswith("-") and len(flag) > 1 and not flag[1:].replace(".", "").isdigit():
            name = known.get(flag)
            skipping = name is None and flag not in ("-h", "--help")
            if skipping:
                _unknown(given, flag, flag.lstrip("-"), fields, {name: option(name) for name in fields})
            elif name in seen and not _is_list(fields[name].annotation):
                given.problems.append(f"{flag}: {name.replace('_', '-')} was said already")
            elif name is not None:
                seen.add(name)
        if not skipping:
            yield word


def _take_environment(given: Given, fields: Mapping[str, FieldInfo], environment: Mapping[str, str]) -> None:
    settable = {variable(name): name for name in fields if name not in FLAG_ONLY}
    others = SETTING_NAMES | OTHER_VARIABLES
    for said, text in sorted(environment.items()):
        key = said.upper()
        if not key.startswith(ENV_PREFIX) or not text:
            continue
        if key in settable and _SERVICE_URL.match(text):
            given.problems.append(
                f"{said}={text} looks like what Kubernetes sets for a Service of that name; "
                "set enableServiceLinks: false for the pod, or call the Service something else"
            )
        elif key in settable:
            name = settable[key]
            given.take(name, _from_text(fields[name], text), Origin("env", said))
        elif key not in others and not key.startswith(TEST_PREFIX) and not _is_service_link(key, text):
            names = {other.removeprefix(ENV_PREFIX).lower(): other for other in (*settable, *others)}
            _unknown(given, f"environment variable {said}", key.removeprefix(ENV_PREFIX), fields, names)


def _take_file(given: Given, fields: Mapping[str, FieldInfo], path: Path) -> None:
    try:
        entries = list(_read(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, SettingsError) as error:
        told = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())
        given.problems.append(told if str(path) in told else f"{path}: {told}")
        return
    lines: dict[str, int] = {}
    settable = {name: name.replace("_", "-") for name in fields if name not in FLAG_ONLY and name != "config"}
    for key, value, line in entries:
        name, at = key.replace("-", "_"), f"{path.name}:{line}"
        if name not in settable:
            _unknown(given, f"{at}: {key}", name, fields, settable)
        elif name in lines:
            given.problems.append(f"{at}: {key} was said in line {lines[name]} already")
        else:
            given.take(name, _from_yaml(fields[name], value), Origin("file", at))
        lines.setdefault(name, line)


def _read(path: Path) -> Iterator[tuple[str, Any, int]]:
    """Keys of a YAML mapping with their values and lines, as they stand there. Raises for what is not one."""
    loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
    try:
        root = loader.get_single_node()
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            raise SettingsError(f"{path}: must hold settings as key: value")
        for key, value in root.value:
            yield str(key.value), loader.construct_object(value, deep=True), key.start_mark.line + 1
    finally:
        loader.dispose()


def _from_text(info: FieldInfo, text: str) -> Any:
    """A list's items are separated by commas, or the text is a JSON array; other values are read by their field."""
    if not _is_list(info.annotation):
        return text
    if text.lstrip().startswith("["):
        try:
            return json.loads(text)
        except ValueError:
            return text  # pydantic says what is wrong with it
    return [part.strip() for part in text.split(",") if part.strip()]


def _from_yaml(info: FieldInfo, value: Any) -> Any:
    """A single value stands for a list of one."""
    if isinstance(value, str):
        return _from_text(info, value)
    return [value] if _is_list(info.annotation) and isinstance(value, int | float) else value


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) is list or any(get_origin(part) is list for part in get_args(annotation))


def _is_service_link(key: str, text: str) -> bool:
    return bool(_SERVICE_LINK.search(key) or _SERVICE_URL.match(text))


def _unknown(given: Given, said: str, name: str, fields: Mapping[str, FieldInfo], names: Mapping[str, str]) -> None:
    """Add the problem that no setting has `name`. `names` are those to choose from, with how each is written here."""
    plain = name.lower().replace("-", "_")
    why = NOT_HERE.get(plain)
    close = None if why else nearest(plain, names)
    if close is not None and close in fields:
        given.meant.add(close)
    meant = f"; {names[close]} is meant?" if close else f": {why}" if why else ""
    given.problems.append(f"{said}: no such setting{meant}")
