"""What a seed stands for: how big the fleet is, who asks what, and what breaks."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Self

from tests.sim.client import Request
from tests.sim.faults import FAULTS
from tests.sim.model import LETTERS, answer

SPAN = 0.6  # seconds in which clients come and things break: so short that they meet
LONGEST, LONGEST_TURN, ANSWER = 40, 56, 24  # tokens; every pool has room for the longest of all


CROWDS = 0.2  # of all seeds


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
        crowd = rng.random() < CROWDS
        count = rng.randint(4, 10)
        requests: list[Request] = []
        for number in range(count):
            request = _request(rng, str(number), families)
            if crowd:  # short prompts at once, whose answers outgrow the pool
                request = replace(request, prompt=request.prompt[:5], max_tokens=ANSWER, at=0.0)
            goes_on = not crowd and requests and rng.random() < 0.3
            requests.append(_next_turn(rng, request, rng.choice(requests)) if goes_on else request)
        return cls(
            prefills=rng.choice([1, 1, 2, 2, 2]),
            decodes=1 if crowd else rng.choice([1, 2, 2]),
            routers=rng.choice([1, 1, 2]),
            blocks={"prefill": rng.choice([22, 26, 40]), "decode": rng.choice([22, 22, 26, 36])},
            seats=8 if crowd else rng.choice([3, 8]),
            requests=tuple(requests),
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
        max_tokens=rng.choice([1, 2, 3, 5, ANSWER // 2, ANSWER]),
        at=rng.choice([0.0, rng.uniform(0.0, SPAN)]),
        deadline=rng.uniform(0.02, 2.0) if rng.random() < 0.12 else None,
        leaves=rng.uniform(0.0, 0.6) if rng.random() < 0.15 else None,
        priority=-rng.choice([0, 0, 0, 1]),
        conversation=rng.choice(["", "", "talk"]),
    )


def _next_turn(rng: random.Random, request: Request, before: Request) -> Request:
    """The same conversation, when its first answer is probably there: its KV is on a decode worker alone."""
    said = (*before.prompt, *answer(before.prompt, before.max_tokens), *_text(rng, rng.randint(1, 4)))
    return replace(request, prompt=said[:LONGEST_TURN], at=before.at + rng.uniform(0.1, 0.5), conversation="talk")


def _text(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(ord("a") + rng.randrange(LETTERS) for _ in range(length))
