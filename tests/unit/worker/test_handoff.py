"""Two engines and a link in any order of events: pages stay with a ticket while the link may touch them, every ticket
ends once on each side, and what is handed off goes on with the right tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.core.sampling import SamplingParams
from pdserve.core.sequence import EndReason, SequenceSpec
from pdserve.engine.build import BuiltEngine, EngineOptions, build_engine
from pdserve.engine.outputs import PromptDone
from pdserve.transfer import messages as m
from pdserve.worker.handoff import Handoff
from pdserve.worker.messages import Reserve, StartPrefill
from tests.tiny_models import make_tiny_model

ANSWER = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


def spec(length: int, answer: int = ANSWER) -> SequenceSpec:
    tokens = tuple((length * 7 + i * 13) % 250 for i in range(length))
    return SequenceSpec("r", tokens, length, SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True))


@cache
def expected(model: Path, length: int) -> list[int]:
    engine = build(model).engine
    engine.add("t", spec(length))
    while engine.has_work:
        engine.step()
    return [out.token for out in engine.take_outputs().tokens]


def build(model: Path) -> BuiltEngine:
    return build_engine(EngineOptions(model, "float32", "cpu", kv_cache_bytes=1 << 21, max_model_len=128))


class Side:
    """One engine with its hand-off, on one end of the link."""

    def __init__(self, model: Path, link: Link) -> None:
        self.built = build(model)
        self.link = link
        self.events: list[m.TransferEvent] = []
        self.told: list[object] = []
        self.tokens: dict[str, list[int]] = {}
        self.done: list[PromptDone] = []
        self.ends: dict[str, list[EndReason]] = {}
        self.handoff = Handoff(self.built.engine, self, self.told.append, self.built.config.vocab_size)
        self.built.engine._on_layer = self.advance

    def turn(self) -> None:
        """What the engine loop does in one round."""
        events, self.events = self.events, []
        for event in events:
            self.handoff.on_event(event)
        self.built.engine.step()
        outputs = self.built.engine.take_outputs()
        self.handoff.after_step(outputs)
        for token in outputs.tokens:
            self.tokens.setdefault(token.ticket, []).append(token.token)
        self.done += outputs.prompts
        for end in outputs.ends:
            assert end.ticket not in self.built.engine.scheduler, "it is told to have ended, and is here"
            self.ends.setdefault(end.ticket, []).append(end.reason)
        self.built.engine.scheduler.check_integrity()

    def holds(self, ticket: str, slots: torch.Tensor) -> bool:
        """Whether the ticket still owns every page that the link was given for it."""
        found = self.built.engine.scheduler.get(ticket)
        return found is not None and set((slots // 16).tolist()) <= set(found[0].block_table)

    # The link's half that a Handoff sees.

    def start_send(
        self, ticket: str, attempt: int, peer: str, slots: torch.Tensor, num_tokens: int, tells_grant: bool = False
    ) -> None:
        self.link.sends[ticket] = (slots, [0] * 2)

    def advance(self, tickets: Sequence[tuple[str, int]], layer: int) -> None:
        for ticket, tokens in tickets:
            if ticket in self.link.sends:
                self.link.sends[ticket][1][layer] = tokens

    def finish_send(self, ticket: str, first_token: int) -> None:
        if ticket in self.link.sends:
            self.link.firsts[ticket] = first_token

    def stop_send(self, ticket: str) -> None:
        self.link.sends.pop(ticket, None)
        self.events.append(m.SendStopped(ticket))

    def grant(self, ticket: str, attempt: int, peer: str, slots: torch.Tensor, num_tokens: int, held: int) -> None:
        self.link.grants[ticket] = (slots, held)

    def revoke(self, ticket: str, reason: str) -> None:
        self.link.grants.pop(ticket, None)
        self.events.append(m.Revoked(ticket))


class Link:
    """A link without threads: it moves a ticket's pages when it is told to, and checks that it may."""

    def __init__(self, model: Path) -> None:
        self.sends: dict[str, tuple[torch.Tensor, list[int]]] = {}
        self.firsts: dict[str, int] = {}
        self.grants: dict[str, tuple[torch.Tensor, int]] = {}
        self.prefill, self.decode = Side(model, self), Side(model, self)

    def move(self) -> None:
        """Carry every transfer that both sides are ready for."""
        for ticket in [t for t in self.sends if t in self.grants and t in self.firsts]:
            (source, progress), (target, held) = self.sends.pop(ticket), self.grants.pop(ticket)
            assert self.prefill.holds(ticket, source)
            assert self.decode.holds(ticket, target)
            assert progress == [len(source)] * 2
            pages = self.prefill.built.kv.read(0, 2, source[held:], None)
            self.decode.built.kv.write(0, target[held:], pages)
            self.decode.events.append(m.KvReady(ticket, 1, self.firsts[ticket], 1))
            self.prefill.events.append(m.SendCommitted(ticket, 1))

    def snap(self) -> None:
        """The link breaks: every attempt on it fails."""
        self.prefill.events += [m.SendFailed(ticket, "lost") for ticket in self.sends]
        self.decode.events += [m.ReceiveFailed(ticket, 1, "lost") for ticket in self.grants]
        self.sends.clear()
        self.grants.clear()


ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["submit", "submit", "submit one"]), st.integers(1, 60)),
    st.tuples(st.sampled_from(["prefill", "decode", "move", "snap"]), st.just(0)),
    st.tuples(st.sampled_from(["cancel_prefill", "cancel_decode"]), st.integers(0, 5)),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ACTIONS, max_size=25))
def test_any_order_of_events(model: Path, actions: list[tuple[str, int]]) -> None:
    link = Link(model)
    lengths: dict[str, int] = {}
    disturbed: set[str] = set()
    lone: set[str] = set()  # whose first token is the last
    for action, value in actions:
        match action:
            case "submit" | "submit one":
                ticket = str(len(lengths))
                lengths[ticket] = value
                asked = spec(value, 1 if action == "submit one" else ANSWER)
                if action == "submit one":
                    lone.add(ticket)
                link.decode.handoff.reserve(Reserve(ticket, 1, asked, "p"))
                link.prefill.handoff.start_prefill(StartPrefill(ticket, 1, asked, "d"))
            case "prefill":
                link.prefill.turn()
            case "decode":
                link.decode.turn()
            case "move":
                link.move()
            case "snap":
                disturbed |= lengths.keys()
                link.snap()
            case "cancel_prefill":
                disturbed.add(str(value))
                link.prefill.handoff.close(str(value), EndReason.CANCELLED)
            case "cancel_decode":
                disturbed.add(str(value))
                link.decode.handoff.close(str(value), EndReason.CANCELLED)
    for _ in range(200):  # let what can finish finish
        link.prefill.turn()
        link.move()
        link.decode.turn()
    for ticket in lengths:  # what the router does for tickets whose other half ended early
        link.prefill.handoff.close(ticket, EndReason.CANCELLED)
        link.decode.handoff.close(ticket, EndReason.CANCELLED)
    for side in (link.prefill, link.decode):
        side.turn()
        side.turn()
        assert Counter({t: len(r) for t, r in side.ends.items()}) == Counter({t: 1 for t in lengths})
        assert side.built.engine.scheduler.pool.num_owned == 0
    for ticket, length in lengths.items():
        if ticket in lone - disturbed:
            assert link.prefill.tokens[ticket] == expected(model, length)[:1] and ticket not in link.decode.tokens
            assert link.prefill.ends[ticket] == [EndReason.LENGTH]
        elif ticket not in disturbed:
            tokens = link.prefill.tokens[ticket] + link.decode.tokens.get(ticket, [])
            assert tokens == expected(model, length)
            assert link.decode.ends[ticket] == [EndReason.LENGTH]


def test_a_first_token_outside_the_vocabulary_ends_the_try(model: Path) -> None:
    """It is a peer's word; the engine would crash on it, and everybody's answer with it."""
    link = Link(model)
    link.decode.handoff.reserve(Reserve("t", 1, spec(20), "p"))
    link.decode.turn()
    link.grants.clear()
    link.decode.events.append(m.KvReady("t", 1, link.decode.built.config.vocab_size, 1))
    for _ in range(3):
        link.decode.turn()
    assert link.decode.ends == {"t": [EndReason.TRANSFER_FAILED]} and link.decode.tokens == {}
    assert len(link.decode.built.engine.scheduler) == 0


def test_an_answer_that_ends_with_its_first_token_has_ended_when_the_link_let_go(model: Path) -> None:
    """Its end is told with the token. A newer attempt that begins on Ended finds no older one in its way."""
    prefill = Link(model).prefill
    prefill.handoff.start_prefill(StartPrefill("t", 1, spec(20, 1), "d"))
    prefill.turn()
    assert [(done.ticket, done.end) for done in prefill.done] == [("t", EndReason.LENGTH)] and prefill.ends == {}
    prefill.handoff.close("t", EndReason.CANCELLED)  # changes nothing
    prefill.turn()  # takes in that the link let go
    assert prefill.ends == {"t": [EndReason.LENGTH]}
    prefill.handoff.start_prefill(StartPrefill("t", 2, spec(20, 1), "d"))
    for _ in range(2):
        prefill.turn()
    assert (
        prefill.ends == {"t": [EndReason.LENGTH, EndReason.LENGTH]} and prefill.tokens["t"][0] == prefill.tokens["t"][1]
    )
