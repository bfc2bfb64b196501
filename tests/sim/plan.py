"""What a seed stands for: how big the fleet is, who asks what, and what breaks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Self

from tests.sim.client import Request
from tests.sim.faults import FAULTS
from tests.sim.model import LETTERS

SPAN = 0.6  # seconds in which clients come and things break: so short that they meet
LONGEST, ANSWER = 40, 12  # tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """`faults` are names of Nemesis's methods, with the time of each, `echoes` the share of link control that is heard
    twice."""

    prefills: int
    decodes: int
    routers: int
    blocks: dict[str, int]
    seats: int
    requests: tuple[Request, ...]
    faults: tuple[tuple[float, str], ...]
    echoes: float

    @classmethod
    def draw(cls, rng: random.Random) -> Self:
        families = [_text(rng, LONGEST) for _ in range(2)]
        count = rng.randint(4, 10)
        requests = tuple(_request(rng, str(number), families) for number in range(count))
        return cls(
            prefills=rng.choice([1, 1, 2, 2, 2]),
            decodes=rng.choice([1, 2, 2]),
            routers=rng.choice([1, 1, 2]),
            blocks={"prefill": rng.choice([15, 20, 40]), "decode": rng.choice([16, 20, 30])},
            seats=rng.choice([3, 8]),
            requests=requests,
            faults=tuple((rng.uniform(0.0, SPAN), rng.choice(FAULTS)) for _ in range(rng.choice([0, 1, 2, 3, 5]))),
            echoes=rng.choice([0.0, 0.0, 0.1]),
        )


def _request(rng: random.Random, name: str, families: list[tuple[int, ...]]) -> Request:
    """Mostly a beginning of one of few texts, so that there is something to share."""
    length = rng.choice([1, 3, 4, 5, 8, rng.randint(1, LONGEST), LONGEST])
    prompt = rng.choice(families)[:length] if rng.random() < 0.8 else _text(rng, length)
    return Request(
        name=name,
        prompt=prompt,
        max_tokens=rng.choice([1, 2, 3, 5, ANSWER, ANSWER]),
        at=rng.choice([0.0, rng.uniform(0.0, SPAN)]),
        deadline=rng.uniform(0.02, 2.0) if rng.random() < 0.12 else None,
        leaves=rng.uniform(0.0, 0.6) if rng.random() < 0.15 else None,
        priority=-rng.choice([0, 0, 0, 1]),
        conversation=rng.choice(["", "", "talk"]),
    )


def _text(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(ord("a") + rng.randrange(LETTERS) for _ in range(length))
