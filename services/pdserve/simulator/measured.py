"""The cost model of a suite that was measured: each worker tells what its own steps take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, ValidationError

from pdserve.core.errors import ConfigError
from pdserve.policy.estimate import Speed
from pdserve.simulator.costs import Measured


class _Speed(BaseModel):
    """As `policy.estimate.Speed`, in seconds."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    step: NonNegativeFloat
    token: NonNegativeFloat
    square: NonNegativeFloat
    answer: NonNegativeFloat
    read: NonNegativeFloat
    prompts: NonNegativeInt
    answers: NonNegativeInt


class _Worker(BaseModel):
    """What is used of a line; `pdserve status --json` says more."""

    role: str
    model: str
    speed: _Speed


def read_measured(path: Path, model: str | None = None) -> Measured:
    """From what `pdserve probe speed --json` or `pdserve status --json` printed: one object a worker, a line each.

    Prompts take what the mean prefill worker says, answers what the mean decode worker does; where none of that role
    knows, any that does. `model` is needed where the lines are of several. Raises ConfigError.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    read = [_read(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    workers = [worker for worker in read if worker.role in ("prefill", "decode")]
    models = sorted({worker.model for worker in workers})
    if model is None and len(models) > 1:
        raise ConfigError(f"{path} holds workers of several models; say cost.model: {' or '.join(models)}")
    ours = [worker for worker in workers if model in (None, worker.model)]
    if not ours:
        raise ConfigError(f"{path} has no worker of {model}; it has {models}" if models else f"{path} holds no worker")
    return mean_of([(worker.role, Speed(**worker.speed.model_dump())) for worker in ours], str(path))


def mean_of(speeds: Sequence[tuple[str, Speed]], source: str) -> Measured:
    """Of workers' roles and what they learned. Raises ConfigError, which names `source`, where none knows enough."""
    prefill = [(role == "prefill", speed) for role, speed in speeds if speed.knows_prompts]
    decode = [(role == "decode", speed) for role, speed in speeds if speed.knows_answers]
    for known, kind in ((prefill, "prompts"), (decode, "answers")):
        if not known:
            raise ConfigError(
                f"{source}: no worker knows yet what {kind} take; let the suite serve some and measure again"
            )
    return Measured(_mean(prefill), _mean(decode))


def _read(path: Path, number: int, line: str) -> _Worker:
    try:
        return _Worker.model_validate(json.loads(line))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise ConfigError(f"{path}, line {number}: {where}: {first['msg'].lower()}") from error
    except ValueError as error:
        raise ConfigError(f"{path}, line {number}: not JSON: {error}") from error


def _mean(known: Sequence[tuple[bool, Speed]]) -> Speed:
    """Of those whose role it is, or of all where it is nobody's. Coefficients enter linearly, so their mean takes the
    mean of what each would."""
    speeds = [speed for own, speed in known if own] or [speed for _, speed in known]
    count = len(speeds)
    return Speed(
        step=sum(speed.step for speed in speeds) / count,
        token=sum(speed.token for speed in speeds) / count,
        square=sum(speed.square for speed in speeds) / count,
        answer=sum(speed.answer for speed in speeds) / count,
        read=sum(speed.read for speed in speeds) / count,
        prompts=sum(speed.prompts for speed in speeds),
        answers=sum(speed.answers for speed in speeds),
    )
