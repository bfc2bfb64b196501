"""Served models: what the router needs of a model folder, and nothing of its weights."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pdserve.core.errors import ConfigError, UnknownModel
from pdserve.core.sampling import SamplingParams
from pdserve.router.tokenization import TextCodec, read_json


@dataclass(frozen=True)
class ServedModel:
    """One model by its public name. `aliases` are the names that workers may announce it by."""

    name: str
    folder: Path
    aliases: frozenset[str]
    codec: TextCodec
    defaults: SamplingParams
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class ModelFacts:
    """What only workers know of a model: the smallest limit among them."""

    max_model_len: int
    vocab_size: int


class Models:
    """All served models by name."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self._models = {model.name: model for model in models}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def get(self, name: str) -> ServedModel:
        """The model `name`; empty means the only one. Raises UnknownModel, which names those that there are."""
        if not name and len(self._models) == 1:
            return next(iter(self._models.values()))
        if name in self._models:
            return self._models[name]
        raise UnknownModel(f"no model {name!r} here; served: {', '.join(sorted(self._models))}")

    def announced_as(self, name: str) -> ServedModel | None:
        """The served model that a worker means by `name`, if any."""
        return next((model for model in self._models.values() if name in model.aliases), None)


def load_models(options: Iterable[str], resolve: Callable[[str], Path]) -> Models:
    """Load each ``PATH_OR_ID`` or ``NAME=PATH_OR_ID``. Raises ConfigError for a name twice, ModelError for a folder."""
    models: dict[str, ServedModel] = {}
    for option in options:
        name, source = _name_and_source(option)
        folder = resolve(source)
        if not name:  # a folder is known by its own name, anything else by what it was asked for
            name = folder.resolve().name if Path(source).expanduser().is_dir() else source
        if name in models:
            raise ConfigError(f"two models are named {name!r}; use --model NAME=PATH_OR_ID")
        models[name] = load_model(name, folder, source)
    if not models:
        raise ConfigError("no model: give at least one --model PATH_OR_ID")
    return Models(models.values())


def model_sources(options: Iterable[str]) -> list[str]:
    """The folders or ids among ``PATH_OR_ID`` and ``NAME=PATH_OR_ID``, each once."""
    return list(dict.fromkeys(_name_and_source(option)[1] for option in options))


def _name_and_source(option: str) -> tuple[str, str]:
    if Path(option).expanduser().is_dir():  # a folder's name may have a "=" in it
        return "", option
    name, _, source = option.partition("=")
    return (name, source) if source else ("", option)


def load_model(name: str, folder: Path, source: str = "") -> ServedModel:
    """Read a folder's tokenizer, chat template and generation defaults. Raises ModelError."""
    config, generation = read_json(folder / "config.json"), read_json(folder / "generation_config.json")
    codec = TextCodec.load(folder)
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    if eos is None:
        token = read_json(folder / "tokenizer_config.json").get("eos_token")
        eos = codec.tokenizer.token_to_id(token) if isinstance(token, str) else None
    resolved = folder.resolve()
    return ServedModel(
        name=name,
        folder=folder,
        aliases=frozenset({name, str(folder), str(resolved), resolved.name} | ({source} if source else set())),
        codec=codec,
        defaults=sampling_defaults(generation),
        eos_token_ids=_ids(eos),
    )


def sampling_defaults(generation: dict[str, Any]) -> SamplingParams:
    """What generation_config.json says about sampling where it samples at all, else the neutral values.

    Rounded to float32, which is what travels: a client that repeats the values it was told gets the same tokens.
    """
    neutral = SamplingParams()
    if not generation.get("do_sample"):
        return neutral

    def pick(name: str, otherwise: float) -> float:
        return otherwise if generation.get(name) is None else to_float32(float(generation[name]))

    return replace(
        neutral,
        temperature=pick("temperature", neutral.temperature),
        top_k=int(pick("top_k", neutral.top_k)),
        top_p=pick("top_p", neutral.top_p),
        min_p=pick("min_p", neutral.min_p),
        repetition_penalty=pick("repetition_penalty", neutral.repetition_penalty),
    )


def to_float32(value: float) -> float:
    result: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return result


def _ids(value: Any) -> tuple[int, ...]:
    """End-of-sequence ids, which model folders give as a number or as a list."""
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list) else (int(value),)
