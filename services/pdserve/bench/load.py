"""What load to put on a target: a published trace or a synthetic stream, paced by arrivals or by answers. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pdserve.core.errors import ConfigError
from pdserve.simulator.parts import WorkloadPart
from pdserve.simulator.problems import sentences
from pdserve.simulator.workload import Arrival

BLOCK_TOKENS = 16  # of a synthetic prompt's shared beginning; a server's own blocks may be of any size
_KIND = re.compile(r"(\d+(?:\.\d+)?)\s*%\s*(\d+)\s*/\s*(\d+)")


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` requests: the first of a `trace`, or of a stream of conversations that is drawn from a seed.

    Open loop: they are sent when they are due, whatever became of those before. `rate` is how many conversations of a
    stream begin in a second, or how many times as fast a trace is replayed. `burstiness` is the coefficient of
    variation of the gaps between beginnings (a Gamma process; 1: Poisson).
    Closed loop, with `streams`: so many users who each ask again as soon as they are answered; when is nobody's plan.

    `mix` are (share, prompt tokens, answer tokens), shares adding up to 1; the coefficients of variation hold for each.
    """

    requests: int | None = None
    rate: float | None = None
    streams: int | None = None
    trace: Path | None = None
    mix: tuple[tuple[float, int, int], ...] = ()
    prompt_cv: float = 0.0
    output_cv: float = 0.0
    burstiness: float = 1.0
    turns: int = 1
    think: float = 1.0
    system: int = 0

    def check(self) -> None:
        """Raise ConfigError for what contradicts itself."""
        if (self.trace is None) == (not self.mix):
            raise ConfigError("say what to send: --trace, or --prompt-tokens and --output-tokens, or --mix")
        if self.streams is not None and self.rate is not None:
            raise ConfigError("--streams is a closed loop, whose answers set the rate; leave --rate out")
        if self.streams is None and self.rate is None:
            raise ConfigError("say how fast: --rate, or --streams for a closed loop")
        if self.trace is not None and (self.turns, self.system, self.burstiness) != (1, 0, 1.0):
            raise ConfigError(
                "--turns, --system-tokens and --burstiness are for synthetic streams; a trace has its own"
            )

    def at_rate(self, rate: float) -> Load:
        """The same, so fast."""
        return replace(self, rate=rate)

    def arrivals(self, seed: int) -> list[Arrival]:
        """The requests in order of arrival. Same seed, same requests. Raises ConfigError."""
        self.check()
        try:
            return WorkloadPart.model_validate(self._content()).arrivals(BLOCK_TOKENS, seed)
        except ValidationError as error:
            raise ConfigError(
                "\n  ".join(["this load cannot be made:", *sentences(error, WorkloadPart, {})])
            ) from error

    def as_dict(self) -> dict[str, Any]:
        """What a result says of it."""
        kinds = [
            {"share": share, "prompt_tokens": prompt, "output_tokens": output} for share, prompt, output in self.mix
        ]
        return {
            "loop": "open" if self.streams is None else "closed",
            "requests": self.requests,
            "rate": self.rate,
            "streams": self.streams,
            "trace": self.trace.name if self.trace else None,
            "mix": kinds,
            "prompt_cv": self.prompt_cv,
            "output_cv": self.output_cv,
            "burstiness": self.burstiness,
            "turns": self.turns,
            "think_seconds": self.think,
            "system_tokens": self.system,
        }

    def _content(self) -> dict[str, Any]:
        rate = 1.0 if self.rate is None else self.rate  # a closed loop keeps their order alone
        if self.trace is not None:
            return {"trace": self.trace, "rate": rate, "limit": self.requests}
        (_, prompt, output), *others = self.mix
        spread = {"prompt_cv": self.prompt_cv, "output_cv": self.output_cv}
        stream = {
            "rate": rate,
            "prompt": prompt,
            "output": output,
            "burstiness": self.burstiness,
            "turns": self.turns,
            "think": self.think,
            "system": self.system,
            "others": [{"share": share, "prompt": p, "output": o, **spread} for share, p, o in others],
            **spread,
        }
        return {"synthetic": stream if self.requests is None else {**stream, "requests": self.requests}}


def parse_mix(text: str) -> tuple[tuple[float, int, int], ...]:
    """((0.8, 128, 64), (0.2, 2048, 16)) of "80% 128/64 + 20% 2048/16". Raises ConfigError."""
    kinds = []
    for part in text.split("+"):
        match = _KIND.fullmatch(part.strip())
        if not match:
            raise ConfigError(f"--mix: {part.strip()!r} is not a share and lengths, such as 80% 128/64")
        kinds.append((float(match[1]) / 100, int(match[2]), int(match[3])))
    if abs(sum(share for share, _, _ in kinds) - 1) > 1e-6:
        raise ConfigError(f"--mix: the shares of {text!r} must add up to 100%")
    return tuple(kinds)


def fitting(arrivals: Sequence[Arrival], longest: int | None) -> list[Arrival]:
    """Those that a model with room for `longest` tokens can answer; None: all."""
    return [one for one in arrivals if longest is None or one.prompt + one.output <= longest]
