"""Tickets on a decode worker under random faults: the real hand-off, scheduler, pool, books and receiver, without
threads, against a plain model of what each ticket may be told and what its pages must hold.

What a page must hold is known: a token's KV here is a number made of its prompt, its position and its layer. Frames of
anything but the live attempt, and frames that do not fit, carry POISON, so that one that is let in shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.core.layout import KVLayout
from pdserve.core.sampling import SamplingParams
from pdserve.core.sequence import EndReason, SequenceSpec
from pdserve.engine.engine import Engine
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.sampler import SampledToken
from pdserve.engine.scheduler import Scheduled, SchedulerConfig
from pdserve.transfer import messages as m
from pdserve.transfer.common import Common, LinkSettings, Wire
from pdserve.transfer.pages import PageMover
from pdserve.transfer.receiver import Receiver
from pdserve.transfer.receives import Receives
from pdserve.worker import messages as w
from pdserve.worker.handoff import Handoff

LAYOUT = KVLayout(2, 2, 1, 1, "float32", bytes(16))
BLOCKS = 14
ANSWER = 5
POISON = -1.0
PEERS = ("p0", "p1")


def value(family: int, position: int, layer: int) -> float:
    return family * 1000.0 + position * 10.0 + layer + 1


class Pages(KVCache):
    """Runs what is to happen in the middle of a copy, and checks that the pages are still whose they were."""

    def __init__(self) -> None:
        super().__init__(LAYOUT, BLOCKS, "cpu")
        self.meanwhile: Callable[[], None] = lambda: None

    def write(self, layer_start: int, slots: torch.Tensor, data: torch.Tensor) -> None:
        self.meanwhile()
        super().write(layer_start, slots, data)


@dataclass
class Computer:
    """Stands for engine.runner.Runner: computes and samples by `value`."""

    kv: Pages

    def run(self, batch: Sequence[Scheduled], *_: object) -> list[SampledToken]:
        for item in batch:
            sequence = item.sequence
            for position in range(sequence.num_computed, sequence.num_computed + item.count):
                slot = sequence.block_table[position // LAYOUT.block_size] * LAYOUT.block_size
                for layer in range(LAYOUT.num_layers):
                    family = sequence.tokens[position]
                    self.kv.data[layer, :, slot + position % LAYOUT.block_size] = value(family, position, layer)
        return [SampledToken(item.sequence.tokens[0]) for item in batch if item.samples]

    def copy_block(self, source: int, target: int) -> None:
        size = LAYOUT.block_size
        self.kv.data[:, :, target * size : (target + 1) * size] = self.kv.data[:, :, source * size :][:, :, :size]


@dataclass
class FakeLink:
    """One link: what it was told, and a real receiver whose thread is this test."""

    peer: str
    common: Common
    used: float = 0.0
    said: list[m.ControlMessage] = field(default_factory=list)
    receiver: Receiver = field(init=False)

    def __post_init__(self) -> None:
        self.receiver = Receiver(self.common, self.peer, self.post)

    def post(self, message: m.ControlMessage) -> None:
        self.said.append(message)


@dataclass
class Model:
    """What the test knows of one ticket."""

    family: int
    prompt_len: int
    given: int
    peer: str | None
    attempt: int = 1
    live: bool = False  # an attempt is granted
    held: int = 0  # leading tokens whose KV stays, whatever becomes of the attempt
    landed: list[int] = field(default_factory=list)  # per layer, of the live attempt
    frames: int = 0
    asked: w.Rearm | None = None  # a Rearm that was not answered
    ready: int = 0  # the attempt that completed
    cancelled: bool = False
    ends: list[EndReason] = field(default_factory=list)

    def begin(self, held: int) -> None:
        self.live, self.held, self.landed, self.frames = True, held, [held] * LAYOUT.num_layers, 0

    def drop(self) -> None:
        """The attempt is over; what landed in all layers stays."""
        if self.live:
            self.live, self.held = False, max(self.held, min(self.landed))


class TicketMachine(RuleBasedStateMachine):
    """`turn` is what the engine loop does; between two of them links and routers do what they like."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = Pages()
        self.events: deque[m.TransferEvent] = deque()
        self.told: deque[w.TicketMessage] = deque()
        self.common = Common(self.kv, LAYOUT, LinkSettings(64, 256), Wire(lambda *_: None), self.events.append)
        self.links: dict[str, FakeLink] = {}
        self.gone: list[FakeLink] = []
        self.receives = Receives(self.common, cast(Any, self.links))
        config = SchedulerConfig(64, 8, 8, lookahead_tokens=1, watermark_blocks=0)
        self.engine = Engine(cast(Any, Computer(self.kv)), LAYOUT, config)
        self.handoff = Handoff(self.engine, cast(Any, self.receives), self.told.append, 1 << 16)
        self.mover = PageMover(self.kv, LAYOUT)
        self.tickets: dict[str, Model] = {}
        self.stale: list[m.Announce | m.Commit] = []

    @property
    def open(self) -> list[str]:
        return [ticket for ticket, model in self.tickets.items() if not model.ends]

    # Links.

    @initialize(families=st.lists(st.integers(1, 3), min_size=2, max_size=2), lengths=st.lists(
        st.integers(3, 9), min_size=2, max_size=2))  # fmt: skip
    def begin(self, families: list[int], lengths: list[int]) -> None:
        for peer, family, length in zip(PEERS, families, lengths, strict=True):
            self.link_up(peer)
            self.reserve(family, length, peer)

    def link_up(self, peer: str) -> None:
        if peer not in self.links:
            with self.common.lock:
                link = self.links[peer] = FakeLink(peer, self.common)
                self.receives.on_link(cast(Any, link))

    @rule(peer=st.sampled_from([*PEERS, "", ""]))
    def link_down(self, peer: str) -> None:
        if (link := self.links.get(peer)) is not None:
            with self.common.lock:
                del self.links[peer]
                link.receiver.close()
                self.receives.fail(peer, "link lost")
            for model in self.tickets.values():
                if model.peer == peer:
                    model.drop()
            self.gone.append(link)

    # Routers.

    def reserve(self, family: int, length: int, peer: str | None) -> None:
        ticket = f"t{len(self.tickets)}"
        self.tickets[ticket] = Model(family, length, length, peer)
        self.handoff.reserve(w.Reserve(ticket, 1, self.spec(family, length, length), peer))
        self.hear()

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0, 9), more=st.integers(0, 2), ahead=st.sampled_from([1, 1, 1, 3, 0]),
          peer=st.sampled_from(PEERS))  # fmt: skip
    def rearm(self, pick: int, more: int, ahead: int, peer: str) -> None:
        ticket = self.open[pick % len(self.open)]
        model = self.tickets[ticket]
        newest, given = model.attempt, model.given
        if model.asked is not None:
            newest, given = model.asked.attempt, len(model.asked.spec.token_ids)
        given = min(given + more, model.prompt_len + ANSWER - 1)
        message = w.Rearm(ticket, newest + ahead, self.spec(model.family, given, model.prompt_len), peer)
        done = self.known_ready(ticket)
        over = model.cancelled or ticket not in self.engine.scheduler
        if not over and not done:
            if ahead and model.peer is not None:
                model.asked = message
            else:
                model.cancelled = True  # it contradicts its ticket
        self.handoff.rearm(message)
        if done and not over:
            assert self.told[-1] == w.AlreadyReady(ticket, model.ready, model.family)
        self.hear()

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0, 9))
    def cancel(self, pick: int) -> None:
        ticket = self.open[pick % len(self.open)]
        self.tickets[ticket].cancelled = True
        self.handoff.close(ticket, EndReason.CANCELLED)

    # Senders.

    @precondition(lambda self: self.receiving)
    @rule(pick=st.integers(0, 9), layer=st.integers(0, 1), layers=st.integers(1, 2), count=st.integers(1, 9),
          flaw=st.sampled_from(["", "", "", "", "", "number", "repeat", "gap", "late", "stranger"]),
          meanwhile=st.sampled_from(["", "", "", "cancel", "rearm", "link_down", "close", "turn"]))  # fmt: skip
    def frame(self, pick: int, layer: int, layers: int, count: int, flaw: str, meanwhile: str) -> None:
        """The next frame of one or both layers, and another one that may not fit, or while which things happen."""
        ticket = self.receiving[pick % len(self.receiving)]
        model = self.tickets[ticket]
        if (at := model.landed[1 - layer]) < model.given:
            self.deliver(ticket, model, model.frames, range(1 - layer, 2 - layer), range(at, at + 1), True, "")
        if flaw in ("late", "stranger"):
            self.misdirect(ticket, model, flaw)
            return
        if layer or model.landed[0] != model.landed[1]:
            layers = 1
        at = model.landed[layer] + {"gap": 1, "repeat": -1}.get(flaw, 0)
        count = min(count, model.given - at)
        if count > 0 and at >= 0:
            number = model.frames + (flaw == "number")
            tokens = range(at, at + count)
            self.deliver(ticket, model, number, range(layer, layer + layers), tokens, not flaw, meanwhile)

    def misdirect(self, ticket: str, model: Model, flaw: str) -> None:
        """What would fit comes under an older attempt's number, or from somebody else; it must change nothing."""
        layer = model.landed.index(min(model.landed))
        peer, attempt = str(model.peer), model.attempt
        if flaw == "late":
            attempt -= 1
        else:
            peer = next(name for name in PEERS if name != peer)
        link = self.links.get(peer) or FakeLink(peer, self.common)
        size = LAYOUT.layer_token_bytes
        if (at := model.landed[layer]) < model.given:
            self.land(link, m.Announce(ticket, attempt, model.frames, layer, 1, at, 1, size), POISON)
        link.receiver._commit(m.Commit(ticket, attempt, model.frames, model.family))
        assert isinstance(link.said[-1], m.TicketClosed) and self.live(ticket)

    @precondition(lambda self: self.receiving)
    @rule(pick=st.integers(0, 9))
    def rest(self, pick: int) -> None:
        """All that is missing, and the commit."""
        ticket = self.receiving[pick % len(self.receiving)]
        model = self.tickets[ticket]
        for layer, at in enumerate(model.landed):
            if at < model.given:
                self.deliver(ticket, model, model.frames, range(layer, layer + 1), range(at, model.given), True, "")
        self.commit(self.receiving.index(ticket), 0)

    @precondition(lambda self: self.receiving)
    @rule(pick=st.integers(0, 9), off=st.sampled_from([0, 0, 0, 1, -1]))
    def commit(self, pick: int, off: int) -> None:
        ticket = self.receiving[pick % len(self.receiving)]
        model = self.tickets[ticket]
        link = self.links[str(model.peer)]
        commit = m.Commit(ticket, model.attempt, model.frames + off, model.family)
        complete = off == 0 and min(model.landed) == model.given
        link.receiver._commit(commit)
        self.stale.append(commit)
        if complete:
            assert link.said[-1] == m.Committed(ticket, model.attempt)
            model.live, model.held, model.ready = False, model.given, model.attempt
        else:
            assert isinstance(link.said[-1], m.TicketClosed)
            model.drop()

    @precondition(lambda self: self.receiving)
    @rule(pick=st.integers(0, 9))
    def close(self, pick: int) -> None:
        """The sender gives up."""
        ticket = self.receiving[pick % len(self.receiving)]
        model = self.tickets[ticket]
        with self.common.lock:
            assert self.receives.on_closed(str(model.peer), m.TicketClosed(ticket, model.attempt, "stopped"))
        model.drop()

    @precondition(lambda self: self.stale)
    @rule(pick=st.integers(0, 99), peer=st.sampled_from(PEERS))
    def late(self, pick: int, peer: str) -> None:
        """A frame or a commit of an attempt that is over comes, from its own peer or another one, or over a link that
        is gone."""
        replaced = [s for s in self.stale if self.live(s.ticket) and s.attempt < self.tickets[s.ticket].attempt]
        chosen = replaced or self.stale
        message = chosen[pick % len(chosen)]
        model = self.tickets[message.ticket]
        if self.live(message.ticket) and message.attempt == model.attempt and peer == model.peer:
            return
        link = self.links.get(peer) or next((link for link in self.gone if link.peer == peer), None)
        if link is None:
            return
        if isinstance(message, m.Commit):
            link.receiver._commit(message)
            assert isinstance(link.said[-1], m.TicketClosed)
        else:
            self.land(link, message, POISON)

    # The engine loop.

    @rule(family=st.integers(1, 3), length=st.integers(1, 9), peer=st.sampled_from([*PEERS, *PEERS, None]),
          heals=st.sampled_from([True, True, False]))  # fmt: skip
    def round(self, family: int, length: int, peer: str | None, heals: bool) -> None:
        """A turn in a world that goes on: links come back, what failed is rearmed, and there are new requests."""
        self.turn()
        for ticket in self.open:
            model = self.tickets[ticket]
            assert model.asked is None or model.cancelled, "a Rearm was not answered"
        if heals:
            for name in PEERS:
                self.link_up(name)
            for pick, ticket in enumerate(self.open):
                model = self.tickets[ticket]
                if not (model.peer is None or model.live or model.asked or model.ready or model.cancelled):
                    self.rearm(pick, length % 3, 1, PEERS[length % 2])
        if len(self.open) < 3:
            self.reserve(family, length, peer)

    def turn(self) -> None:
        """Take in what links said, and run a step."""
        while self.events:
            self.take(self.events.popleft())
        self.engine.step()
        outputs = self.engine.take_outputs()
        self.handoff.after_step(outputs)
        for end in outputs.ends:
            self.tickets[end.ticket].ends.append(end.reason)
        self.engine.scheduler.check_integrity()

    def take(self, event: m.TransferEvent) -> None:
        if isinstance(event, m.KvReady):
            self.check_pages(event.ticket)
        self.handoff.on_event(event)
        self.hear()

    def hear(self) -> None:
        """What a router is told must be what the model expects."""
        while self.told:
            message = self.told.popleft()
            model = self.tickets[message.ticket]
            match message:
                case w.ReservedPages(_, _, held):
                    if model.peer is not None:
                        model.begin(held)
                case w.AttemptFailed(_, attempt, _):
                    assert attempt == model.attempt and not model.live and not model.ready and not model.cancelled
                case w.Rearmed(ticket, attempt, held):
                    assert model.asked is not None and attempt == model.asked.attempt and not model.ready
                    model.drop()
                    assert held == model.held, "what landed of older attempts is kept, and nothing else"
                    self.check_pages(ticket, held)
                    model.attempt, model.given = attempt, len(model.asked.spec.token_ids)
                    model.peer, model.asked = model.asked.peer, None
                    model.begin(held)
                case w.TicketReady(_, attempt, _):
                    assert attempt == model.ready == model.attempt
                case w.AlreadyReady(_, attempt, first_token):
                    assert attempt == model.ready and first_token == model.family
                    model.asked = None

    # Helpers.

    @property
    def receiving(self) -> list[str]:
        """Tickets whose live attempt's link is up."""
        return [t for t in self.open if self.live(t) and self.tickets[t].peer in self.links]

    def live(self, ticket: str) -> bool:
        model = self.tickets[ticket]
        return self.common.incoming.live(ticket, model.attempt, str(model.peer)) is not None

    def known_ready(self, ticket: str) -> bool:
        """Whether the engine loop has heard that it is ready."""
        model = self.tickets[ticket]
        waiting = any(isinstance(event, m.KvReady) and event.ticket == ticket for event in self.events)
        return bool(model.ready) and not waiting

    def spec(self, family: int, length: int, prompt_len: int) -> SequenceSpec:
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
        return SequenceSpec("r", (family,) * length, prompt_len, params)

    def deliver(
        self, ticket: str, model: Model, number: int, layers: range, tokens: range, fits: bool, meanwhile: str
    ) -> None:
        announce = m.Announce(
            ticket, model.attempt, number, layers.start, len(layers), tokens.start, len(tokens),
            len(layers) * len(tokens) * LAYOUT.layer_token_bytes,
        )  # fmt: skip
        attempt, happened = model.attempt, False

        def during() -> None:
            nonlocal happened
            happened = True
            pick = self.open.index(ticket)
            match meanwhile:
                case "cancel":
                    self.cancel(pick)
                case "rearm":
                    self.rearm(pick, 1, 1, "p1")
                case "link_down":
                    self.link_down(str(model.peer))
                case "close":
                    with self.common.lock:
                        self.receives.on_closed(str(model.peer), m.TicketClosed(ticket, attempt, "stopped"))
                case "turn":
                    self.turn()
            assert self.holds(ticket), "pages left their ticket while a frame was put in them"

        self.kv.meanwhile = during
        # The model counts it first: whatever is told afterwards comes after the copy.
        if fits:
            model.frames += 1
            for layer in layers:
                model.landed[layer] = tokens.stop
        self.land(self.links[str(model.peer)], announce, None if fits else POISON)
        self.kv.meanwhile = lambda: None
        assert happened == fits, "only what fits is let in"
        self.stale.append(announce)
        if not fits or meanwhile == "close":
            model.drop()

    def land(self, link: FakeLink, announce: m.Announce, fill: float | None) -> None:
        layers = range(announce.layer_start, announce.layer_start + announce.layer_count)
        tokens = range(announce.token_start, announce.token_start + announce.token_count)
        family = self.tickets[announce.ticket].family
        numbers = [
            value(family, token, layer) if fill is None else fill for layer in layers for _ in "kv" for token in tokens
        ]
        frame = torch.tensor(numbers, dtype=torch.float32).view(torch.uint8)
        link.receiver._announced += announce.bytes
        link.receiver._land(announce, frame, self.mover)

    def holds(self, ticket: str) -> bool:
        """Whether a ticket owns every page that was granted for it."""
        found, incoming = self.engine.scheduler.get(ticket), self.common.incoming.get(ticket)
        assert incoming is not None
        return found is not None and set((incoming.slots // LAYOUT.block_size).tolist()) <= set(found[0].block_table)

    def check_pages(self, ticket: str, end: int | None = None) -> None:
        """Every layer of the leading tokens (None: of all given ones) is what it must be."""
        if (found := self.engine.scheduler.get(ticket)) is None:
            return
        sequence, model = found[0], self.tickets[ticket]
        for position in range(sequence.num_given if end is None else end):
            slot = sequence.block_table[position // LAYOUT.block_size] * LAYOUT.block_size
            for layer in range(LAYOUT.num_layers):
                for number in self.kv.data[layer, :, slot + position % LAYOUT.block_size].flatten().tolist():
                    assert number == value(model.family, position, layer)

    @invariant()
    def busy_pages_have_an_owner(self) -> None:
        for ticket in self.common.incoming.by_ticket:
            assert ticket in self.engine.scheduler, "a link may write where nobody holds the pages"

    @invariant()
    def what_the_index_offers_is_complete(self) -> None:
        pool = self.engine.scheduler.pool
        for sequence in self.engine.scheduler:
            for index in range(sequence.num_published):
                block = sequence.block_table[index]
                if block in pool._hash_of:
                    for offset in range(LAYOUT.block_size):
                        position = index * LAYOUT.block_size + offset
                        numbers = self.kv.data[:, :, block * LAYOUT.block_size + offset].flatten(1).tolist()
                        for layer, pair in enumerate(numbers):
                            assert set(pair) == {value(sequence.tokens[0], position, layer)}

    @invariant()
    def nobody_ends_twice(self) -> None:
        assert all(len(model.ends) <= 1 for model in self.tickets.values())

    def teardown(self) -> None:
        """Every ticket ends once, and every page is free again."""
        for ticket in self.open:
            self.handoff.close(ticket, EndReason.CANCELLED)
        self.turn()
        self.turn()
        assert [len(model.ends) for model in self.tickets.values()] == [1] * len(self.tickets)
        assert self.engine.scheduler.pool.num_owned == 0 and not self.common.incoming.by_ticket
        assert not self.handoff._tickets and not self.handoff._rearming and not self.handoff._closing


TestTickets = TicketMachine.TestCase
TestTickets.settings = settings(max_examples=200, stateful_step_count=40)
