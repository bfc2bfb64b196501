"""What arrives at a fleet: public traces as they are published, and synthetic streams from a seed.

A prompt is its length and the ids of its blocks: equal ids are equal prefixes, as in Mooncake's traces. A request
without ids shares nothing with any other.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from pdserve.core.errors import ConfigError

MOONCAKE_BLOCK = 512  # tokens under one of the trace's ids
MARK, BENCH_VERSION = "pdserve_bench", 1  # what tells a bench's result from other JSON
_HEAD = 4096  # characters of a file that tell its format


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: `at` in seconds from the beginning, `prompt` and `output` in tokens (1 or more).

    `block_ids` name the prompt's blocks of `block_tokens` tokens from its beginning, the last one perhaps in part; an
    id stands for everything up to its end. `session` groups the turns of a conversation. `priority`: more goes first;
    within one, `tenant`s share what there is.
    """

    at: float
    prompt: int
    output: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK
    session: int | None = None
    tenant: str = ""
    priority: int = 0


def read_trace(path: Path) -> list[Arrival]:
    """The requests of a published trace, in order of arrival, the first at 0. The format is told by its columns.

    Mooncake's JSONL (timestamp in ms, input_length, output_length, hash_ids), Azure's CSV (TIMESTAMP, ContextTokens,
    GeneratedTokens), vidur's CSV (arrived_at in s, num_prefill_tokens, num_decode_tokens), and what `pdserve bench`
    measured as JSON. Raises ConfigError, naming the file and the line, for what is none of these.
    """
    try:
        found = list(_format(path)(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text: {error.reason}") from error
    if not found:
        raise ConfigError(f"{path} holds no requests")
    found.sort(key=lambda arrival: arrival.at)
    start = found[0].at
    return [replace(arrival, at=arrival.at - start) for arrival in found]


def _format(path: Path) -> Callable[[Path], Iterator[Arrival]]:
    """What reads a file, by what it begins with."""
    with path.open(encoding="utf-8") as text:
        head = text.read(_HEAD).lstrip()
    if not head.startswith("{"):
        return _mooncake if path.suffix == ".jsonl" else _table
    rows = MARK not in head and ('"input_length"' in head or path.suffix == ".jsonl")
    return _mooncake if rows else _bench


def _mooncake(path: Path) -> Iterator[Arrival]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                yield Arrival(
                    at=float(row["timestamp"]) / 1e3,
                    prompt=int(row["input_length"]),
                    output=max(1, int(row["output_length"])),
                    block_ids=tuple(map(int, row["hash_ids"])),
                )
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path}, line {number}: not a request of a Mooncake trace: {error!r}") from error


def _bench(path: Path) -> Iterator[Arrival]:
    """Those that were answered: of the others nobody knows how long an answer would have been."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if content.get(MARK) != BENCH_VERSION or not isinstance(content.get("requests"), list):
        raise ConfigError(
            f'{path} is no result of a bench: wanted are "{MARK}": {BENCH_VERSION} and "requests", a list'
        )
    for number, row in enumerate(content["requests"]):
        try:
            at, prompt, output = float(row["at"]), int(row["prompt_tokens"]), int(row["output_tokens"] or 0)
            if not math.isfinite(at):
                raise ValueError(f"at: {at} is no time")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, requests.{number}: not a request of a bench: {error!r}") from error
        if output > 0:
            yield Arrival(at, max(1, prompt), output)


def _table(path: Path) -> Iterator[Arrival]:
    with path.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        columns = set(reader.fieldnames or ())
        known = next((table for table in _TABLES if set(table[0]) <= columns), None)
        if known is None:
            wanted = " or ".join(", ".join(keys) for keys, _ in _TABLES)
            raise ConfigError(f"{path} has the columns {sorted(columns)}; wanted are {wanted}")
        keys, clock = known
        for number, row in enumerate(reader, 2):
            try:
                at, prompt, output = (row[key] for key in keys)
                yield Arrival(clock(at), max(1, int(float(prompt))), max(1, int(float(output))))
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error


def _timestamp(text: str) -> float:
    """Seconds of "2023-11-16 18:17:03.9799600"; the seventh digit is more than datetime reads."""
    whole, _, fraction = text.partition(".")
    return datetime.fromisoformat(whole + "+00:00").timestamp() + float(f"0.{fraction or 0}")


_TABLES: tuple[tuple[tuple[str, str, str], Callable[[str], float]], ...] = (
    (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _timestamp),
    (("arrived_at", "num_prefill_tokens", "num_decode_tokens"), float),
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many tokens: `mean`, and the coefficient of variation `cv` of a log-normal distribution (0: always the
    mean)."""

    mean: float
    cv: float = 0.0
    longest: int = 1 << 20

    def draw(self, rng: random.Random) -> int:
        if not self.cv:
            return max(1, round(self.mean))
        variance = math.log(1 + self.cv**2)
        return min(self.longest, max(1, round(rng.lognormvariate(math.log(self.mean) - variance / 2, variance**0.5))))


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of turns: their `share` of all (0 to 1), and how long they are."""

    share: float
    prompt: Lengths
    output: Lengths


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A stream of conversations: `rate` of them begin each second, by a Gamma process with coefficient of variation
    `burstiness` (1: Poisson). Each has `turns` requests; a turn's prompt is everything before it, `system` tokens that
    all share, and `prompt` new ones, and follows `think` seconds (exponential, its mean) after an answer of the length
    that it had would have been read at `reading` tokens a second. `others` are shares of the turns that are unlike
    `prompt` and `output`: each turn draws what it is.
    """

    rate: float
    prompt: Lengths
    output: Lengths
    burstiness: float = 1.0
    turns: int = 1
    think: float = 10.0
    reading: float = 20.0
    system: int = 0
    block_tokens: int = 16
    others: tuple[Kind, ...] = ()

    def arrivals(self, count: int, seed: int) -> list[Arrival]:
        """The first `count` requests, in order of arrival. Same seed, same requests."""
        rng, made, clock, session, ids = random.Random(seed), list[Arrival](), 0.0, 0, _Ids()
        shape = 1 / self.burstiness**2
        # Later turns overlap later conversations, so more conversations begin than are needed for `count` requests.
        while len(made) < count or (self.turns > 1 and clock < sorted(a.at for a in made)[count - 1]):
            clock += rng.gammavariate(shape, 1 / (self.rate * shape))
            made += self._conversation(rng, clock, session, ids)
            session += 1
        return sorted(made, key=lambda arrival: arrival.at)[:count]

    def _conversation(self, rng: random.Random, begin: float, session: int, ids: _Ids) -> Iterator[Arrival]:
        at, tokens = begin, self.system
        blocks = [ids.shared(index) for index in range(self.system // self.block_tokens)]
        for _ in range(self.turns):
            prompts, outputs = self._lengths(rng)
            tokens += prompts.draw(rng)
            output = outputs.draw(rng)
            while len(blocks) < tokens // self.block_tokens:
                blocks.append(ids.fresh())
            yield Arrival(at, tokens, output, tuple(blocks), self.block_tokens, session)
            tokens += output
            at += output / self.reading + rng.expovariate(1 / self.think)

    def _lengths(self, rng: random.Random) -> tuple[Lengths, Lengths]:
        chance = rng.random() if self.others else 1.0  # without others a seed draws nothing more than it ever did
        for kind in self.others:
            chance -= kind.share
            if chance < 0:
                return kind.prompt, kind.output
        return self.prompt, self.output


class _Ids:
    """Block ids: those of the shared beginning, and new ones."""

    def __init__(self) -> None:
        self._next = 1 << 32

    @staticmethod
    def shared(index: int) -> int:
        return index

    def fresh(self) -> int:
        self._next += 1
        return self._next


def scale(arrivals: Sequence[Arrival], rate: float, limit: int | None = None) -> list[Arrival]:
    """The first `limit` requests, `rate` times as fast. Raises ConfigError for a rate of 0 or less."""
    if rate <= 0:
        raise ConfigError(f"a trace is replayed at a rate above 0, not {rate}")
    return [replace(arrival, at=arrival.at / rate) for arrival in arrivals[:limit]]


def repeat(arrivals: Sequence[Arrival], times: int) -> list[Arrival]:
    """`times` copies side by side that share no prefix with one another, for a fleet so many times as large."""
    highest = 1 + max((max(arrival.block_ids, default=0) for arrival in arrivals), default=0)
    made = [
        replace(arrival, block_ids=tuple(block + copy * highest for block in arrival.block_ids))
        for arrival in arrivals
        for copy in range(times)
    ]
    return made


def loop(arrivals: Sequence[Arrival], times: int) -> list[Arrival]:
    """The requests again and again, `times` in all, a mean gap between the last one and the first; no time shares a
    prefix or a conversation with another."""
    if times == 1 or not arrivals:
        return list(arrivals)
    span = arrivals[-1].at * len(arrivals) / max(1, len(arrivals) - 1)
    blocks = 1 + max((max(arrival.block_ids, default=0) for arrival in arrivals), default=0)
    sessions = 1 + max(arrival.session or 0 for arrival in arrivals)
    return [
        replace(
            arrival,
            at=arrival.at + time * span,
            block_ids=tuple(block + time * blocks for block in arrival.block_ids),
            session=None if arrival.session is None else arrival.session + time * sessions,
        )
        for time in range(times)
        for arrival in arrivals
    ]


def merge(streams: Sequence[Sequence[Arrival]]) -> list[Arrival]:
    """Streams side by side that share no prefix and no conversation with one another, in order of arrival."""
    made, blocks, sessions = list[Arrival](), 0, 0
    for arrivals in streams:
        made += [
            replace(
                arrival,
                block_ids=tuple(block + blocks for block in arrival.block_ids),
                session=None if arrival.session is None else arrival.session + sessions,
            )
            for arrival in arrivals
        ]
        blocks += 1 + max((max(arrival.block_ids, default=0) for arrival in arrivals), default=0)
        sessions += 1 + max((arrival.session or 0 for arrival in arrivals), default=0)
    return sorted(made, key=lambda arrival: arrival.at)
