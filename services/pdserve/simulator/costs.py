"""How long an engine step takes: one interface, and models with their sources.

A step computes chunks of prompts and one token for each of some running answers. Times are in seconds.
"""

from __future__ import annotations

import csv
import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

from pdserve.core.errors import ConfigError
from pdserve.policy.estimate import Speed, squares

# (tokens that have KV already, tokens to compute now)
Chunk = tuple[int, int]


class CostModel(Protocol):
    """`context` is the sum over the `decoding` answers of the tokens that have KV. Costs of a step of decoding alone
    must be affine in `context` for a fixed `decoding`: the simulation takes many such steps at once."""

    def step(self, chunks: Sequence[Chunk], decoding: int, context: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Fitted:
    """Coefficients in ms. A prompt of l tokens, of which p have KV already:

        prefill = A + B sum(l - p) + C sum(l^2 - p^2);    decode = A' + B' sum(context) + C' batch

    with other decode coefficients from a batch of `threshold` on. The form is DistServe's (OSDI 2024, appendix A, and
    its simulator's): attention over a prompt costs the square of its length, so a chunk costs the difference of two
    squares. A step with both is the sum without a second constant: they share the pass over the weights. No step is
    faster than that pass, A', where a line through long prompts would have it so.
    """

    prefill: tuple[float, float, float]
    decode: tuple[float, float, float]
    decode_large: tuple[float, float, float] | None = None
    threshold: int = 95
    stages: int = 1  # of pipeline parallelism; each adds a millisecond to a prefill

    def step(self, chunks: Sequence[Chunk], decoding: int, context: int) -> float:
        milliseconds = 0.0
        if chunks:
            constant, linear, square = self.prefill
            new = sum(count for _, count in chunks)
            milliseconds = (constant + linear * new + square * squares(chunks)) / self.stages + self.stages
            if self.stages == 1:
                milliseconds -= 1
            milliseconds = max(milliseconds, self.decode[0] / self.stages)
        if decoding:
            large = self.decode_large is not None and decoding >= self.threshold
            constant, linear, each = self.decode_large if large and self.decode_large else self.decode
            milliseconds += ((0.0 if chunks else constant) + linear * context + each * decoding) / self.stages
        return milliseconds / 1e3

    @classmethod
    def distserve(cls, path: Path, model: str, tensor_parallel: int = 1) -> Fitted:
        """From a profile of DistServe's repository (profile_data/*.json). Raises ConfigError."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))[model][str(tensor_parallel)]
            small, large = found["decoding_smallbs"], found["decoding_largebs"]
            return cls(tuple(found["prefill"]), tuple(small), tuple(large), found["decoding_large_small_bs_threshold"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} has no profile of {model} at {tensor_parallel} GPUs: {error!r}") from error


# Mooncake's prefill on 8 A800 with a 70B shape: its Fig. 14 at five lengths, fitted to within 1.4% with t = -15.2 +
# 0.11353 n + 7.312e-7 n^2 ms. Its decode takes 26.7 ms for a token at batch 1 and short contexts, 30.8 ms at 128k
# tokens.
MOONCAKE = Fitted((-15.2, 0.11353, 7.312e-7), (26.3, 3.2e-5, 0.4))


@dataclass(frozen=True, slots=True)
class Hardware:
    """One worker's accelerators: `flops` a second at 16 bits, `memory` bytes a second, each with the share of it that
    is reached, and `overhead` seconds a step for everything else."""

    flops: float
    memory: float
    flops_share: float = 0.55
    memory_share: float = 0.8
    overhead: float = 2e-3


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`parameters` that a token passes, `layers`, `hidden` size, `kv_width` (KV heads times head size), and `bytes` a
    number."""

    parameters: float
    layers: int
    hidden: int
    kv_width: int
    bytes: int = 2

    @property
    def kv_token_bytes(self) -> int:
        """2 (K and V) x layers x kv_width x bytes."""
        return 2 * self.layers * self.kv_width * self.bytes


@dataclass(frozen=True, slots=True)
class Roofline:
    """Of each of a step's operators the longer of computing and reading (Williams et al., "Roofline", CACM 2009), one
    after the other as they run, and a constant.

    Matrices: 2 FLOPs a parameter and token; all weights are read once. Attention of prompts, chunk by chunk, and of
    answers: 4 x hidden x layers FLOPs for each pair of a token and one that it attends to (Kaplan et al.,
    arXiv:2001.08361, table 1, forward pass); the KV that is attended to is read once. So a chunk hides the reading of
    weights, and neither that of the answers' KV nor, in small chunks of a long prompt, that of its own.
    """

    hardware: Hardware
    model: ModelShape

    def step(self, chunks: Sequence[Chunk], decoding: int, context: int) -> float:
        hardware, model = self.hardware, self.model
        new = sum(count for _, count in chunks) + decoding
        if not new:
            return 0.0
        pair = 4 * model.hidden * model.layers
        flops, read = hardware.flops * hardware.flops_share, hardware.memory * hardware.memory_share
        seconds = hardware.overhead + max(2 * model.parameters * new / flops, model.parameters * model.bytes / read)
        for before, count in chunks:
            pairs = count * before + count * (count + 1) // 2
            seconds += max(pair * pairs / flops, (before + count) * model.kv_token_bytes / read)
        return seconds + context * max(pair / flops, model.kv_token_bytes / read)


@dataclass(frozen=True, slots=True)
class Table:
    """Splitwise's way (ISCA 2024, its simulator's performance model): what was measured, and lines between the points
    and through the last two of each end. Decode does not depend on the context.

    `prompt` is by prompt tokens. `token` is by running answers, or, `by_tokens`, by tokens of prompt and read with the
    number of answers nevertheless, as its simulator does: hardly any batch slows decode there. A mixed step takes the
    prompt time of all its tokens, times 1.1. Points are (tokens or answers, seconds), ascending, two or more.
    """

    prompt: tuple[tuple[float, float], ...]
    token: tuple[tuple[float, float], ...]

    MIXED = 1.1

    def step(self, chunks: Sequence[Chunk], decoding: int, context: int) -> float:
        if not chunks:
            return _interpolate(self.token, decoding) if decoding else 0.0
        seconds = _interpolate(self.prompt, sum(count for _, count in chunks) + decoding)
        return seconds * self.MIXED if decoding else seconds

    @classmethod
    def splitwise(
        cls, path: Path, model: str, hardware: str, tensor_parallel: int = 8, *, by_tokens: bool = False
    ) -> Table:
        """From the measurements of Splitwise's repository (perf_model.csv, times in ms): the median of each number of
        prompt tokens, and of each number of answers. Raises ConfigError."""
        prompt, token = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
        known = set[str]()
        try:
            with path.open(encoding="utf-8", newline="") as lines:
                for row in csv.DictReader(lines):
                    known.add(f"{row['model']} on {row['tensor_parallel']} {row['hardware']}")
                    if (row["model"], row["hardware"], int(row["tensor_parallel"])) != (
                        model,
                        hardware,
                        tensor_parallel,
                    ):
                        continue
                    answers = int(row["batch_size"])
                    tokens = answers * int(row["prompt_size"])
                    prompt[tokens].append(float(row["prompt_time"]) / 1e3)
                    token[tokens if by_tokens else answers].append(float(row["token_time"]) / 1e3)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no table of Splitwise's: {error!r}") from error
        if len(prompt) < 2 or len(token) < 2:
            there = ", ".join(sorted(known)) or "nothing"
            raise ConfigError(f"{path} has not {model} on {tensor_parallel} {hardware}; it has {there}")
        return cls(_medians(prompt), _medians(token))


def _medians(points: dict[int, list[float]]) -> tuple[tuple[float, float], ...]:
    return tuple((x, median(points[x])) for x in sorted(points))


def _interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """On the line between the two points around `x`, or through the nearest two; 0 or more."""
    right = min(max(1, bisect_left(points, (x,))), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


@dataclass(frozen=True, slots=True)
class Measured:
    """What workers learned from their own steps (`policy.estimate`): prompts as a prefill worker computes them, answers
    as a decode worker does. A step with both has the prompts' constant only: they share the pass over the weights.
    """

    prefill: Speed
    decode: Speed

    def step(self, chunks: Sequence[Chunk], decoding: int, context: int) -> float:
        answers = self.decode.answer * decoding + self.decode.read * context
        if not chunks:
            return self.decode.step + answers if decoding else 0.0
        new = sum(count for _, count in chunks)
        return self.prefill.prompt_seconds(new, squares(chunks), chunk=new) + answers
