"""The router's and the workers' logic in virtual time, seed by seed; see world.py."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from pdserve.router.models import Models, load_models
from tests.sim.loop import VirtualLoop, run
from tests.sim.world import World
from tests.tiny_models import EOS_ID, write_tiny_tokenizer


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_tokenizer(folder)
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {EOS_ID}}}')
    made = load_models([f"tiny={folder}"], Path)
    gc.freeze()  # what torch and others have loaded need not be looked through again with every seed
    yield made
    gc.unfreeze()


# What is logged as an error and is in order here.
EXPECTED_ERRORS = frozenset({"engine_stalled"})
SEEDS = int(os.environ.get("PDSERVE_SIM_SEEDS", "500"))
BLOCK = 50
REPLAYED = 10
# What every block of seeds must have come across: there are dozens of each in it.
MUST_HAPPEN = {"Rearmed", "AttemptFailed", "TicketReady", "KvCommitted", "cancelled", "done", "left"}
ELSEWHERE = """
import sys
from pathlib import Path
from pdserve.router.models import load_models
from tests.sim.test_simulation import digests
folder, start, stop = sys.argv[1:]
print(*digests(range(int(start), int(stop)), load_models([f"tiny={folder}"], Path)), sep="\\n")
"""


def simulate(seed: int, models: Models, *, told: bool = False) -> World:
    """One seed, to its end. `told`: what the code under test logs is among the events."""
    made: list[World] = []

    async def main(loop: VirtualLoop) -> None:
        made.append(World(loop, seed, models))
        with logs(made[0], told=told):
            await made[0].run()

    run(main)
    return made[0]


@contextmanager
def logs(world: World, *, told: bool) -> Iterator[None]:
    """What is logged as an error is a problem; the rest is an event, or nothing."""

    def note(logger: Any, method: str, event: dict[str, Any]) -> Any:
        about = " ".join(f"{key}={value}" for key, value in event.items())
        if method == "error" and event["event"] not in EXPECTED_ERRORS:
            world.problem(about)
        elif told:
            world.log(f"log {method} {about}")
        raise structlog.DropEvent

    before = structlog.get_config()
    level = logging.DEBUG if told else logging.ERROR
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, note],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**before)


def check(seed: int, models: Models) -> World:
    world = simulate(seed, models)
    if world.problems:
        again = f"PDSERVE_SIM_SEED={seed} python -m pytest -s tests/sim/test_simulation.py -k replay"
        pytest.fail("\n".join([*world.problems[:20], str(world.plan), f"again, with its events: {again}"]))
    return world


@pytest.mark.timeout(600)
@pytest.mark.parametrize("start", range(0, SEEDS, BLOCK))
def test_seeds(start: int, models: Models) -> None:
    """Every answer is right and whole, whatever breaks; books add up after each event, and nothing is left behind."""
    seen: Counter[str] = Counter()
    for seed in range(start, start + BLOCK):
        seen += check(seed, models).seen
    print(dict(seen))
    assert not MUST_HAPPEN - seen.keys(), f"{MUST_HAPPEN - seen.keys()} never happened: these seeds test too little"


@pytest.mark.skipif("PDSERVE_SIM_SEED" not in os.environ, reason="PDSERVE_SIM_SEED names the seed to replay")
def test_replay(models: Models) -> None:
    """A seed with all that happened, for reading."""
    world = simulate(int(os.environ["PDSERVE_SIM_SEED"]), models, told=True)
    print("\n".join([*world.events, str(world.plan), str(dict(world.seen))]))
    assert not world.problems, "\n".join(world.problems)


def test_a_seed_is_one_story(models: Models) -> None:
    """Whatever the addresses of objects and the hashes of strings are: the same events at the same times, here twice
    and in two other processes."""
    seeds = range(1000, 1000 + REPLAYED)
    ours = digests(seeds, models)
    assert digests(seeds, models) == ours
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-c", ELSEWHERE, str(models.get("tiny").folder), str(seeds.start), str(seeds.stop)]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ours


def digests(seeds: Iterable[int], models: Models) -> list[str]:
    """A hash of each seed's events."""
    worlds = (simulate(seed, models) for seed in seeds)
    return [hashlib.sha256("\n".join(world.events).encode()).hexdigest() for world in worlds]
