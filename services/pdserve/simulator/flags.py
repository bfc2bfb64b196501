"""What the command line says of a plan in flags: for the common case no file is needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pdserve.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Flags:
    """None: not said. `rate` is how many times as fast a trace is replayed, or how many conversations of a synthetic
    stream begin in a second; `requests` are the first ones of a trace, or how many of a stream there are."""

    prefill: int | None = None
    decode: int | None = None
    colocated: int | None = None
    link: str | None = None
    model: str | None = None
    hardware: str | None = None
    devices: int | None = None
    measured: Path | None = None
    trace: Path | None = None
    rate: float | None = None
    requests: int | None = None
    prompt: float | None = None
    output: float | None = None
    policy: str | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    seed: int | None = None


def apply(flags: Flags, content: dict[str, Any]) -> None:
    """Put flags over what a file says. One that says what contradicts the file replaces it: --colocated its prefill and
    decode workers, --hardware its cost model, --trace its synthetic stream. Raises ConfigError."""
    _apply_fleet(flags, content)
    _apply_cost(flags, content)
    _apply_workload(flags, content)
    said = {
        "fleet.link": flags.link, "model": flags.model, "policy": flags.policy, "seed": flags.seed,
        "slo.ttft_ms": flags.ttft_ms, "slo.itl_ms": flags.itl_ms,
    }  # fmt: skip
    put(content, {name: value for name, value in said.items() if value is not None})


def _apply_fleet(flags: Flags, content: dict[str, Any]) -> None:
    split = {"prefill": flags.prefill, "decode": flags.decode}
    said = {name: value for name, value in {**split, "colocated": flags.colocated}.items() if value is not None}
    if not said:
        return
    fleet = _within(content, "fleet")
    if flags.prefill is None and flags.decode is None:
        fleet.update(prefill=0, decode=0)
    elif flags.colocated is None:
        fleet["colocated"] = 0
    fleet.update(said)


def _apply_cost(flags: Flags, content: dict[str, Any]) -> None:
    if flags.measured is not None:
        if flags.hardware is not None or flags.devices is not None:
            raise ConfigError("--measured says what --hardware and --devices would; give one or the other")
        content["cost"] = {"measured": str(flags.measured)}
    elif flags.hardware is not None:
        content["cost"] = {"hardware": flags.hardware, "devices": flags.devices or 1}
    elif flags.devices is not None:
        put(content, {"cost.devices": flags.devices})


def _apply_workload(flags: Flags, content: dict[str, Any]) -> None:
    lengths = {name: value for name, value in (("prompt", flags.prompt), ("output", flags.output)) if value is not None}
    if (flags.trace, flags.rate, flags.requests) == (None, None, None) and not lengths:
        return
    if flags.trace is not None and lengths:
        raise ConfigError(
            "--prompt-tokens and --output-tokens are for a synthetic stream, --trace brings its own lengths"
        )
    load = _within(content, "workload")
    if flags.trace is not None:
        load.pop("synthetic", None)
        load["trace"] = str(flags.trace)
    elif lengths:
        load.pop("trace", None)
    if load.get("trace") is None:
        stream = {"rate": flags.rate, "requests": flags.requests, **lengths}
        _within(load, "synthetic").update((name, value) for name, value in stream.items() if value is not None)
    else:
        replay = {"rate": flags.rate, "limit": flags.requests}
        load.update((name, value) for name, value in replay.items() if value is not None)


def put(content: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Set single values: {"fleet.prefill": 4}. Raises ConfigError where a value stands in the way."""
    for path, value in changes.items():
        *parts, name = path.split(".")
        inner = content
        for depth, part in enumerate(parts, 1):
            inner = _within(inner, part, ".".join(parts[:depth]))
        inner[name] = value


def _within(content: dict[str, Any], name: str, path: str = "") -> dict[str, Any]:
    """What `name` holds, made where it is nothing yet. Raises ConfigError for no keys; `path` is its full name."""
    if content.get(name) is None:
        content[name] = {}
    inner = content[name]
    if not isinstance(inner, dict):
        raise ConfigError(f"{path or name}: must hold keys, not {inner!r}")
    return inner


def parse_changes(texts: Iterable[str]) -> dict[str, Any]:
    """{"fleet.prefill": 4} of ["fleet.prefill=4"]; values are YAML. Raises ConfigError."""
    changes = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not all(name.split(".")):
            raise ConfigError(f"{text!r} is not KEY=VALUE, such as fleet.prefill=4")
        try:
            changes[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"{name}: {value!r} is not YAML") from error
    return changes
