"""A page is never readable by another request before it is overwritten in full: free pages are filled with poison, and
none of it reaches an output or a block that others may share.

Two prefill engines and a decode engine, each with a hub of real links, in one process: transfers fail, are damaged,
cancelled and armed anew at random, over pools so small that pages change hands all the time.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from msgspec import structs

from pdserve.core.sampling import SamplingParams
from pdserve.core.sequence import EndReason, SequenceSpec
from pdserve.engine.build import BuiltEngine, EngineOptions, build_engine
from pdserve.engine.outputs import Ended, TokenOut
from pdserve.policy.pull import PullDecision
from pdserve.transfer.hub import LinkHub
from pdserve.transfer.messages import Announce, Commit, ControlMessage, TransferEvent
from pdserve.worker import messages as m
from pdserve.worker import pulls
from pdserve.worker.handoff import Handoff
from tests.integration.link_ends import PATIENCE, End, settings
from tests.integration.suites import prompt
from tests.tiny_models import make_tiny_model

POISON = 3.0e4
BLOCK, CHUNK, BLOCKS, TOKEN_BYTES = 16, 64, 30, 512
ANSWER, MAX_ATTEMPTS = 5, 5
LENGTHS = (15, 16, 17, 40, 64, 65, 80)
REQUESTS, AT_ONCE = 60, 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


def build(model: Path, blocks: int = BLOCKS, caching: bool = True) -> BuiltEngine:
    options = EngineOptions(
        model, "float32", "cpu", BLOCK, blocks * BLOCK * TOKEN_BYTES, max_model_len=128, max_num_batched_tokens=CHUNK,
        lookahead_tokens=4, prefix_caching=caching,
    )  # fmt: skip
    return build_engine(options)


def spec(tokens: Sequence[int], known: Sequence[int] = ()) -> SequenceSpec:
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    return SequenceSpec("r", (*tokens, *known), len(tokens), params)


@cache
def expected(model: Path, tokens: tuple[int, ...]) -> list[int]:
    """The answer of an engine that nobody used before."""
    engine = build(model, caching=False).engine
    engine.add("t", spec(tokens))
    while engine.has_work:
        engine.step()
    return [out.token for out in engine.take_outputs().tokens]


class Side(End):
    """An engine with its hand-off and its links; whatever is free in it is poisoned."""

    def __init__(self, name: str, model: Path, woken: threading.Event) -> None:
        self.built = build(model)
        super().__init__(name, layout=self.built.layout, num_blocks=1)
        self.data = self.built.kv.data

        def notify(event: TransferEvent) -> None:
            self.events.put(event)
            woken.set()

        self.hub = LinkHub(
            self.built.kv,
            self.built.layout,
            settings(frame_bytes=16 * TOKEN_BYTES, ring_bytes=512 * TOKEN_BYTES, target_bytes=2 * TOKEN_BYTES),
            send_control=lambda peer, epoch, message: self._outbox.put((peer, epoch, message)),
            established=lambda peer, epoch: self.ups.put(epoch),
            closed=lambda peer, epoch, reason: self.downs.put(reason),
            notify=notify,
        )
        self.told: list[m.TicketMessage] = []
        self.engine = self.built.engine
        self.engine._on_layer = self.hub.advance
        self.handoff = Handoff(self.engine, self.hub, self.told.append, self.built.config.vocab_size)
        self.data.fill_(POISON)
        self._poison_what_is_freed()
        self._turned, self._rounds = threading.Condition(), 0
        self._write, self._chance = self.built.kv.write, random.Random(0)
        self.built.kv.write = self._write_late  # type: ignore[method-assign]

    def _write_late(self, layer_start: int, slots: torch.Tensor, data: torch.Tensor) -> None:
        """Called by link threads: some copies take as long as some rounds of the engine loop."""
        with self._turned:
            if self._chance.random() < 0.2:
                due = self._rounds + self._chance.randrange(1, 4)
                self._turned.wait_for(lambda: self._rounds >= due, timeout=0.1)
        self._write(layer_start, slots, data)

    def _poison_what_is_freed(self) -> None:
        pool = self.engine.scheduler.pool
        release, allocate = pool.release, pool.allocate

        def poison(blocks: Sequence[int]) -> None:
            for block in blocks:
                self.data[:, :, block * BLOCK : (block + 1) * BLOCK] = POISON

        def poison_released(blocks: Sequence[int]) -> None:
            release(blocks)
            poison([b for b in blocks if not pool._references[b] and b not in pool._hash_of])

        def poison_allocated(count: int) -> list[int]:
            blocks = allocate(count)  # what was evicted was cached until now
            poison(blocks)
            return blocks

        pool.release, pool.allocate = poison_released, poison_allocated  # type: ignore[method-assign]

    def turn(self) -> tuple[list[m.TicketMessage], list[object]]:
        """What the engine loop does in a round: its messages about tickets, its tokens and ends."""
        while True:
            try:
                self.handoff.on_event(self.events.get_nowait())
            except queue.Empty:
                break
        self.handoff.give_up_late(time.monotonic())
        self.engine.step()
        outputs = self.engine.take_outputs()
        self.handoff.after_step(outputs)
        self.engine.scheduler.check_integrity()
        self.check_pages()
        with self._turned:
            self._rounds += 1
            self._turned.notify_all()
        told, self.told[:] = list(self.told), []
        return told, [*outputs.tokens, *outputs.ends]

    def close(self) -> None:
        """As an End does, but patient: Gloo does not notice that a link ended while its connections are made."""
        self.cable.set()
        self.hub.shutdown()
        for thread in self.hub_threads():
            thread.join(PATIENCE)
        super().close()

    def check_pages(self) -> None:
        """No block that others may share holds any poison, and nobody wrote into one that is free."""
        pool, spots = self.engine.scheduler.pool, (self.data == POISON).permute(2, 0, 1, 3, 4).reshape(BLOCKS, -1)
        found = {block for block in pool._hash_of if spots[block].any()}
        assert not found, f"{self.name}: blocks {found} are shared and were never filled"
        found = {block for block in pool._free if not spots[block].all()}
        assert not found, f"{self.name}: blocks {found} were written to when they were free"


class World:
    """Three sides, their links, and a router's decisions, made at random."""

    def __init__(self, model: Path, seed: int) -> None:
        self.model, self.rng, self.woken = model, random.Random(seed), threading.Event()
        self.decode, *self.prefills = self.sides = [Side(name, model, self.woken) for name in ("d", "p0", "p1")]
        self.epoch = 0
        self.damage: dict[str, str] = {}  # ticket -> what is done to its next frame
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.tokens: dict[str, dict[int, int]] = {}
        self.attempts: dict[str, int] = {}
        self.inputs: dict[tuple[str, int], list[int]] = {}
        self.answers: dict[str, list[int]] = {}
        self.targets: dict[str, Side] = {}
        self.waiting: dict[str, Side] = {}  # armed, but the prefill engine has an older attempt still
        self.alive: set[str] = set()
        self.rounds = 0
        self.fates: list[tuple[int, str, str]] = []  # in which round what happens to whom
        self.seen: Counter[str] = Counter()
        for prefill in self.prefills:
            prefill.routes["d"] = self._tap(prefill)
            self.decode.routes[prefill.name] = lambda epoch, message, to=prefill: to.hub.on_control("d", epoch, message)
            self.link(prefill)

    def link(self, prefill: Side) -> None:
        """End the link to a prefill engine, if there is one, and open it anew."""
        for side in (prefill, self.decode):
            side.cable.clear()
        for side, peer in ((prefill, "d"), (self.decode, prefill.name)):
            side.hub.close(peer, self.epoch, "cut")
        self.epoch += 1
        for side, peer in ((prefill, "d"), (self.decode, prefill.name)):
            side.hub.open(peer, self.epoch, side is prefill, "gloo")
        for side in (prefill, self.decode):
            side.cable.set()

    def _tap(self, prefill: Side) -> Callable[[int, ControlMessage], None]:
        def deliver(epoch: int, message: ControlMessage) -> None:
            kind = self.damage.pop(message.ticket, "") if isinstance(message, Announce) else ""
            if isinstance(message, Announce) and kind == "shift":  # bytes that belong a token further on
                message = structs.replace(message, token_start=message.token_start + 1)
            self.decode.hub.on_control(prefill.name, epoch, message)
            if isinstance(message, Announce) and kind == "commit":  # of a transfer that has just begun
                first = self.answers[message.ticket][len(self.known(message.ticket, message.attempt))]
                commit = Commit(message.ticket, message.attempt, message.number + 1, first)
                self.decode.hub.on_control(prefill.name, epoch, commit)

        return deliver

    def submit(self, ticket: str) -> None:
        text = prompt(max(LENGTHS), self.rng.randrange(3))
        tokens = tuple(text[: self.rng.choice(LENGTHS)])
        if self.rng.random() < 0.3:
            tokens = (*tokens[: len(tokens) * 2 // 3], *prompt(len(tokens), 9)[len(tokens) * 2 // 3 :])
        self.prompts[ticket], self.tokens[ticket], self.attempts[ticket] = tokens, {}, 1
        self.answers[ticket] = expected(self.model, tokens)
        self.alive.add(ticket)
        target = self.targets[ticket] = self.rng.choice(self.prefills)
        match self.rng.choice(["damage", "cancel", "rearm", "cut", "", "", ""]):
            case "damage":
                self.damage[ticket] = self.rng.choice(["shift", "commit"])
            case "cancel" | "rearm" | "cut" as fate:
                self.fates = sorted([*self.fates, (self.rounds + self.rng.randrange(12), fate, ticket)])
        self.decode.handoff.reserve(m.Reserve(ticket, 1, spec(tokens), target.name))
        self.start(ticket)

    def start(self, ticket: str) -> None:
        target = self.targets[ticket]
        if target.engine.scheduler.get(ticket) is not None:
            target.handoff.close(ticket, EndReason.CANCELLED)
            self.waiting[ticket] = target
            return
        self.waiting.pop(ticket, None)
        text, known = self.prompts[ticket], self.known(ticket, self.attempts[ticket])
        start = m.StartPrefill(ticket, self.attempts[ticket], spec(text, known), "d", self.rng.choice([0, len(text)]))
        target.handoff.start_prefill(start)

    def known(self, ticket: str, attempt: int) -> list[int]:
        """The first token of the answer, if it was told before this attempt."""
        return self.inputs.get((ticket, attempt), [])

    def rearm(self, ticket: str) -> None:
        self.attempts[ticket] += 1
        if self.attempts[ticket] > MAX_ATTEMPTS:
            self.decode.handoff.close(ticket, EndReason.CANCELLED)
            return
        text, first = self.prompts[ticket], self.tokens[ticket]
        known = [first[len(text)]] if len(text) in first else []
        self.inputs[ticket, self.attempts[ticket]] = known
        target = self.targets[ticket] = self.rng.choice(self.prefills)
        self.decode.handoff.rearm(m.Rearm(ticket, self.attempts[ticket], spec(text, known), target.name))

    def harm(self) -> None:
        """What is due in this round."""
        while self.fates and self.fates[0][0] <= self.rounds:
            _, fate, ticket = self.fates.pop(0)
            match fate:
                case "cancel":
                    for side in self.rng.sample(self.sides, self.rng.randint(1, 3)):
                        side.handoff.close(ticket, EndReason.CANCELLED)
                case "rearm" if ticket in self.alive:
                    self.rearm(ticket)
                case "cut":
                    self.link(self.rng.choice(self.prefills))

    def turn(self) -> bool:
        """One round of all engines; whether anything happened."""
        self.rounds += 1
        busy = False
        for side in self.sides:
            told, outputs = side.turn()
            busy = busy or bool(told or outputs or side.engine.has_work)
            for event in (*told, *outputs):
                self.seen[type(event).__name__] += 1
                self.on_event(side, event)
        for ticket in [t for t, side in self.waiting.items() if side.engine.scheduler.get(t) is None]:
            busy = True
            self.start(ticket) if ticket in self.alive else self.waiting.pop(ticket)
        return busy

    def on_event(self, side: Side, event: object) -> None:
        match event:
            case m.AttemptFailed(ticket, attempt, _) if attempt == self.attempts[ticket]:
                self.rearm(ticket)
            case m.Rearmed(ticket, attempt, _) if attempt == self.attempts[ticket]:
                self.start(ticket)
            case TokenOut(ticket, position, token, _):
                right = self.answers[ticket][position - len(self.prompts[ticket])]
                assert token == right, f"{ticket}: {token} of {side.name} at {position}, where {right} is due"
                self.tokens[ticket][position] = token
            case Ended(ticket, reason, _) if side is self.decode:
                self.alive.discard(ticket)
                self.seen[reason] += 1
                for prefill in self.prefills:
                    prefill.handoff.close(ticket, EndReason.CANCELLED)
            case Ended(ticket, reason, _) if reason not in (EndReason.LENGTH, EndReason.STOP):
                if ticket in self.alive and ticket not in self.waiting and side is self.targets[ticket]:
                    self.rearm(ticket)

    def run(self) -> None:
        """All requests, to the end of each."""
        left = [str(number) for number in range(REQUESTS)]
        deadline = time.monotonic() + 6 * PATIENCE
        while left or self.alive or any(side.engine.scheduler.pool.num_owned for side in self.sides):
            while left and len(self.alive) < AT_ONCE:
                self.submit(left.pop())
            self.harm()
            self.woken.clear()
            if not self.turn():
                self.woken.wait(0.05)
            assert time.monotonic() < deadline, (self.alive, [side.engine.scheduler._lent for side in self.sides])

    def close(self) -> None:
        for side in self.sides:
            side.close()


@pytest.mark.parametrize("seed", range(3))
def test_poison_reaches_no_output(model: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token is the clean engine's, whatever transfers came to nothing; no shared block was ever incomplete."""
    pull = PullDecision(True, "for the test", 1.0)
    monkeypatch.setattr(pulls, "choose_pull", lambda *, tokens, **rest: pull if tokens > 0 else PullDecision(False, ""))
    world = World(model, seed)
    try:
        world.run()
        for side in world.sides:
            assert side.engine.scheduler.pool.num_owned == 0
            side.engine.scheduler.check_integrity()
        assert world.seen[EndReason.LENGTH] > 0.5 * REQUESTS, world.seen
        assert world.seen["Rearmed"] and world.seen["AttemptFailed"], world.seen
    finally:
        world.close()
