"""Hundreds of requests at once over real engines with small pools, while links, engines and clients fail, and running
answers move from one decode engine to the other.

PDSERVE_LIFECYCLES says how many (500; `make soak` runs 10,000), PDSERVE_SEED repeats a run's choices.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
from collections import Counter
from collections.abc import Callable, Coroutine
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from pdserve.transfer.messages import Committed, ControlMessage, Grant, TicketClosed
from tests.chaos.engines import PATIENCE, Cable, Engine, Fabric, engine_settings
from tests.chaos.lifecycles import SHORT, Lifecycle, Prompt, Turn, family, references
from tests.tiny_models import make_tiny_model

LIFECYCLES = int(os.environ.get("PDSERVE_LIFECYCLES", "500"))
AT_ONCE = 16
PREFILLS, DECODES = ("p0", "p1"), ("d0", "d1")
EVERY = 20  # lifecycles a link is harmed
LEASE = 0.5  # seconds until a front gives up a control stream that is silent; theirs is longer
MOVED_BY = 16  # events of a request, after which a move is wanted at the latest
HARM = ("cancel decode", "cancel prefill", "cancel both", "rearm", "rearm")


class Nemesis:
    """Breaks something after so many lifecycles, and mends it."""

    def __init__(self, fabric: Fabric, rng: random.Random, total: int) -> None:
        self.fabric, self.rng = fabric, rng
        self.turn = Turn()
        self.done: Counter[str] = Counter()
        self.cuts: Counter[str] = Counter()  # ends of links that were brought about, by engine
        self.echoes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy: set[str] = set()  # engines that are being killed and started anew
        kinds: list[Callable[[], Coroutine[Any, Any, None]]] = [self.cut, self.cut_half, self.swallow, self.stall]
        rare = max(1, total // 1000)
        often = [(at + 8, kinds[at // EVERY % len(kinds)]) for at in range(0, total - EVERY, EVERY)]
        kills = [(total * (2 * at + 1) // (5 * rare), self.kill_prefill) for at in range(rare)]
        kills += [(total * (2 * at + 2) // (5 * rare), self.kill_decode) for at in range(rare)]
        stops = [(total * (at + 1) // (2 * rare + 1), self.freeze) for at in range(2 * rare)]
        self._plan = sorted([*often, *kills, *stops], key=lambda item: item[0])

    def after(self, finished: int) -> None:
        """So many lifecycles are through."""
        while self._plan and self._plan[0][0] <= finished:
            _, harm = self._plan.pop(0)
            self.done[harm.__name__] += 1
            task = asyncio.create_task(harm(), name=harm.__name__)
            self._tasks.add(task)

    async def rest(self) -> None:
        """Wait until all is mended."""
        async with asyncio.timeout(3 * PATIENCE):
            await asyncio.gather(*self._tasks)

    def watch(self, cable: Cable) -> None:
        """Say some words again, later: grants, ends and acks must not count twice."""

        def echo(source: Engine, message: ControlMessage) -> ControlMessage:
            if isinstance(message, Grant | TicketClosed | Committed) and self.rng.random() < 0.05:
                self.echoes += 1
                asyncio.get_running_loop().call_later(self.rng.choice([0.0, 0.01, 0.3]), cable.deliver, source, message)
            return message

        cable.tap = echo

    async def link(self, one: str, other: str) -> None:
        cable = self.fabric.open(one, other)
        self.watch(cable)
        await cable.settled()  # or over already, where an engine was killed: then its new links are on their way

    def _pick(self) -> Cable | None:
        """A link that is up; from now on its end is no news."""
        free = [c for c in self.fabric.cables.values() if c.up.is_set() and not c.over.is_set() and not c.doomed]
        free = [c for c in free if not self._busy & {engine.name for engine in c.ends}]
        if not free:
            return None
        cable = self.rng.choice(free)
        cable.doomed = True
        self.cuts.update(engine.name for engine in cable.ends)
        return cable

    async def _mend(self, cable: Cable) -> None:
        one, other = cable.ends
        if not self._busy & {one.name, other.name}:
            await self.link(one.name, other.name)

    async def cut(self) -> None:
        """Both fronts see the control stream end."""
        if (cable := self._pick()) is not None:
            cable.end("cut")
            await self._mend(cable)

    async def cut_half(self) -> None:
        """One front sees it; the other one's engine sees the data half go, or its front misses the heartbeat."""
        if (cable := self._pick()) is not None:
            first, missed = self.rng.choice(cable.ends), asyncio.Event()
            cable.end("cut on this side", first)
            asyncio.get_running_loop().call_later(LEASE, missed.set)
            await missed.wait()
            cable.end("no sign of life", cable.other(first))
            await self._mend(cable)

    async def swallow(self) -> None:
        """What one side says is lost, until both miss the heartbeat or a frame misses its deadline."""
        if (cable := self._pick()) is not None:
            silent = self.rng.choice(cable.ends)
            cable.tap = lambda source, message: None if source is silent else message
            asyncio.get_running_loop().call_later(LEASE, cable.end, "no sign of life")
            await cable.over.wait()
            await self._mend(cable)

    async def stall(self) -> None:
        """What one side says comes late, but in order."""
        if (cable := self._pick()) is not None:
            late = self.rng.choice(cable.ends)
            self.cuts.subtract(engine.name for engine in cable.ends)
            cable.doomed = False
            cable.stall(late)
            asyncio.get_running_loop().call_later(0.1, cable.go_on, late)

    async def freeze(self) -> None:
        """A process stands still for less than any deadline."""
        engine = self.fabric[self.rng.choice([*PREFILLS, *DECODES])]
        if engine.alive and engine.name not in self._busy:  # one that is being killed stands still for ever
            engine.freeze()
            asyncio.get_running_loop().call_later(0.2, engine.signal, signal.SIGCONT)

    async def kill_prefill(self) -> None:
        await self._kill(self.rng.choice(PREFILLS), DECODES)

    async def kill_decode(self) -> None:
        name = self.rng.choice(DECODES)
        await self._kill(name, (*PREFILLS, *(other for other in DECODES if other != name)))

    async def _kill(self, name: str, peers: tuple[str, ...]) -> None:
        """A process dies and is started anew, with new links. Lifecycles that found nobody alive try again then."""
        if name in self._busy:
            return
        self._busy.add(name)
        engine = self.fabric[name]
        self.cuts.update(cable.other(engine).name for cable in self.fabric.cables_of(engine))
        await engine.kill()
        self.cuts[name] = 0
        await engine.start()
        self._busy.discard(name)
        await asyncio.gather(*(self.link(name, peer) for peer in peers if peer not in self._busy))
        self.turn.pass_on()


def lifecycle(fabric: Fabric, number: int, prompts: list[Prompt], rng: random.Random) -> Lifecycle:
    request = rng.choice(prompts)
    tokens = rng.choice([1, 2, 3, 4, 6, SHORT, len(request.answer), len(request.answer)])
    life = Lifecycle(fabric, str(number), request, tokens, random.Random(rng.random()))
    if rng.random() < 0.05:
        life.time_remaining = rng.uniform(0.005, 0.2)
    life.harm = [(rng.randrange(10), rng.choice(HARM)) for _ in range(rng.choice([0, 0, 0, 1, 2]))]
    if tokens > SHORT:
        life.harm += [(rng.randrange(MOVED_BY), "move") for _ in range(rng.choice([1, 1, 2]))]
    life.harm.sort()
    return life


@pytest.mark.timeout(60 + LIFECYCLES)
async def test_lifecycles(tmp_path: Path) -> None:
    """Each token is the lone engine's, none is lost or told twice, each ticket ends once in each engine; in the end no
    page is owned, no thread is lost, and only those links are gone that were cut."""
    seed = int(os.environ.get("PDSERVE_SEED") or secrets.randbits(32))
    print(f"\nPDSERVE_SEED={seed}")
    rng = random.Random(seed)
    model = make_tiny_model(tmp_path / "model")
    settings = {name: engine_settings(model, "prefill", blocks=28) for name in PREFILLS}
    settings |= {name: engine_settings(model, "decode", blocks=36) for name in DECODES}
    settings["lone"] = engine_settings(model, "decode", blocks=512, enable_prefix_caching=False)
    async with Fabric(**settings) as fabric:
        nemesis = Nemesis(fabric, rng, LIFECYCLES)
        pairs = [(one, other) for one in PREFILLS for other in DECODES] + [DECODES]
        await asyncio.gather(*(nemesis.link(one, other) for one, other in pairs))
        prompts = await references(fabric, fabric["lone"], family())
        fabric.inboxes.clear()
        await fabric["lone"].close()
        await run(fabric, nemesis, prompts, rng)
        await nemesis.rest()
        fabric.check_ends()
        await fabric.check_idle()
        for name in (*PREFILLS, *DECODES):
            engine = fabric[name]
            assert engine.report.links_lost <= nemesis.cuts[name], f"{name}: {engine.report} {nemesis.cuts}"
        for cable in fabric.cables.values():
            assert cable.up.is_set() and not cable.over.is_set()


async def run(fabric: Fabric, nemesis: Nemesis, prompts: list[Prompt], rng: random.Random) -> None:
    """All lifecycles, AT_ONCE at a time, and that they saw what they should."""
    turn, numbers, finished = nemesis.turn, count(), count(1)
    outcomes: Counter[str] = Counter()
    seen: Counter[str] = Counter()

    async def worker() -> None:
        while (number := next(numbers)) < LIFECYCLES:
            life = lifecycle(fabric, number, prompts, rng)
            outcomes[await life.run(turn)] += 1
            seen.update(life.seen)
            turn.pass_on()
            nemesis.after(next(finished))
        turn.pass_on()

    began = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as workers:
        for _ in range(AT_ONCE):
            workers.create_task(worker())
    print(f"{asyncio.get_running_loop().time() - began:.1f} s: {dict(outcomes)}\n{dict(seen)}\n{dict(nemesis.done)}")
    print(f"echoes {nemesis.echoes}, strays {dict(fabric.strays)}")
    assert outcomes["done"] > LIFECYCLES // 2
    assert {"Rearmed", "AttemptFailed", "TicketReady", "KvCommitted", "Detached"} <= seen.keys()
    assert seen["moved"] > LIFECYCLES // 100
