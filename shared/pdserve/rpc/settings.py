"""Settings of a service: command line over environment (``PDSERVE_``) over YAML file over default.

An unknown option, an unknown key in the file or a misspelt variable is an error, because a setting that silently does
nothing is worse than a service that does not start.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

ENV_PREFIX = "PDSERVE_"
# Variables of other services share the prefix, so that only near misses of our own names can be told to be mistakes.
_NEAR_MISS = 0.88


class ServiceSettings(BaseSettings):
    """What every service has. Subclasses add fields; a field's description is its ``--help`` text."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(0, ge=0, le=65535, description="port to listen on; 0: any free one")
    advertise_host: str | None = Field(
        None, description="name that others reach this service by; default: the host, or this machine's name"
    )
    config: Path | None = Field(None, description="YAML file with settings, keys as the options here")
    launcher_fd: int | None = Field(None, description="socket to the process that started this one (see launcher.py)")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    otlp_endpoint: str | None = Field(None, description="OTLP gRPC endpoint for traces; unset: none are recorded")
    drain_seconds: float = Field(30.0, ge=0, description="how long running work may take once told to stop")

    @classmethod
    def load(cls, argv: Sequence[str] | None = None) -> Self:
        """Settings from `argv` (None: this process's), environment and file. Prints what is wrong and exits with 2."""
        arguments = list(sys.argv[1:] if argv is None else argv)
        try:
            misspelt = near_misses(os.environ, cls.model_fields)
            if misspelt:
                raise SettingsError("; ".join(misspelt))
            return cls(_cli_parse_args=arguments)  # type: ignore[call-arg,unused-ignore]
        except ValidationError as error:
            lines = [_explain(detail["loc"], detail["type"], detail["msg"]) for detail in error.errors()]
        except (SettingsError, OSError, yaml.YAMLError) as error:
            lines = [str(error)]
        for line in lines:
            sys.stderr.write(f"error: {line}\n")
        raise SystemExit(2)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # The command line is put in front of these by pydantic-settings itself.
        return init_settings, env_settings, _YamlSource(settings_cls)


class _YamlSource(PydanticBaseSettingsSource):
    """The file that `config` names in a source of higher rank. Keys may be written with dashes or underscores."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError("this source gives all values at once")

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")
        if path is None:
            return {}
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        if content is None:
            return {}
        if not isinstance(content, dict):
            raise SettingsError(f"{path}: must hold settings as key: value")
        return {str(key).replace("-", "_"): value for key, value in content.items()}


def near_misses(environment: Iterable[str], fields: Iterable[str]) -> list[str]:
    """A sentence for each ``PDSERVE_`` variable that is no field's but looks like a misspelt one."""
    names = {f"{ENV_PREFIX}{field}".upper() for field in fields}
    found = []
    for variable in sorted(environment):
        if not variable.upper().startswith(ENV_PREFIX) or variable.upper() in names:
            continue
        close = difflib.get_close_matches(variable.upper(), names, n=1, cutoff=_NEAR_MISS)
        if close:
            found.append(f"environment variable {variable} is unknown; {close[0]} is meant?")
    return found


def _explain(location: tuple[int | str, ...], kind: str, message: str) -> str:
    name = ".".join(str(part) for part in location)
    option = "--" + name.replace("_", "-")
    if kind == "missing":
        return f"{name} is required: set it with {option}, {ENV_PREFIX}{name.upper()} or in the config file"
    if kind == "extra_forbidden":
        return f"{name}: no such setting"
    return f"{name}: {message} ({option})" if name else message
