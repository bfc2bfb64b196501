"""The router's part of a request, played against engines: tries, attempts, cancels; and what its tokens must be."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import takewhile
from random import Random

from pdserve.core.sampling import SamplingParams
from pdserve.core.sequence import EndReason, SequenceSpec
from pdserve.engine.outputs import Ended, PromptDone, TokenOut
from pdserve.worker import messages as m
from tests.chaos.engines import BLOCK, CHUNK, PATIENCE, Died, Engine, Event, Fabric
from tests.chaos.leaving import Leaving
from tests.integration.suites import prompt

ANSWER = 80  # tokens at most; long enough that one can move before its end
AT_ONCE = 16  # that a lone engine computes
MAX_TRIES, MAX_ATTEMPTS = 6, 8
SHORT = 24  # tokens that every prompt's answer has
EPSILON = 1e-3  # where the greedy choice is as close as this, answers end
GREEDY = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
_MISTAKES = (EndReason.INVALID, EndReason.INTERNAL)
EDGES = (BLOCK, 2 * BLOCK, 3 * BLOCK, CHUNK, 2 * CHUNK)
LENGTHS = sorted({edge + off for edge in EDGES for off in (-1, 0, 1)} | {1, 2})


@dataclass(frozen=True, slots=True)
class Prompt:
    """Input, and the greedy answer to it."""

    tokens: tuple[int, ...]
    answer: tuple[int, ...]

    def spec(self, known: int = 0, max_tokens: int = ANSWER, time_remaining: float | None = None) -> SequenceSpec:
        """As input: the prompt and the first `known` tokens of its answer."""
        given = self.tokens + self.answer[:known]
        params = replace(GREEDY, max_tokens=max_tokens)
        return SequenceSpec("r", given, len(self.tokens), params, time_remaining=time_remaining)


def family(members: int = 3) -> list[tuple[int, ...]]:
    """Prompts of lengths around block and chunk boundaries: beginnings of `members` texts, and forks of them."""
    found = []
    for seed in range(members):
        text, fork = prompt(max(LENGTHS), seed), prompt(max(LENGTHS), seed + members)
        for length in LENGTHS:
            found += [tuple(text[:length]), tuple(text[: length * 2 // 3] + fork[length * 2 // 3 : length])]
    return list(dict.fromkeys(found))


async def references(fabric: Fabric, engine: Engine, texts: Iterable[tuple[int, ...]]) -> list[Prompt]:
    """The greedy answers of one engine that works alone, up to where they hang by a rounding error. Texts whose answer
    is too short then are left out."""
    tickets = {f"reference-{number}": tokens for number, tokens in enumerate(texts)}
    params = replace(GREEDY, logprobs=2)
    answers: dict[str, list[TokenOut]] = {ticket: [] for ticket in tickets}
    window = asyncio.Semaphore(AT_ONCE)

    async def ask(ticket: str, tokens: tuple[int, ...]) -> None:
        async with window, asyncio.timeout(3 * PATIENCE):
            inbox = fabric.inbox(ticket)
            engine.send(m.Reserve(ticket, 1, SequenceSpec("r", tokens, len(tokens), params), None))
            while not isinstance(event := (await inbox.get())[1], Ended):
                assert not isinstance(event, Died), event
                if isinstance(event, TokenOut):
                    answers[ticket].append(event)
            assert event.reason is EndReason.LENGTH, event

    async with asyncio.TaskGroup() as asking:
        for ticket, tokens in tickets.items():
            asking.create_task(ask(ticket, tokens))
    assert all(len(answer) == ANSWER for answer in answers.values())
    clear = {ticket: tuple(out.token for out in takewhile(_clear, answers[ticket])) for ticket in tickets}
    found = [Prompt(tokens, clear[ticket]) for ticket, tokens in tickets.items() if len(clear[ticket]) >= SHORT]
    assert len(found) > 0.9 * len(tickets) and sum(len(one.answer) == ANSWER for one in found) > 0.5 * len(tickets)
    return found


def _clear(out: TokenOut) -> bool:
    return out.logprobs is not None and out.logprobs.top[0][1] - out.logprobs.top[1][1] > EPSILON


class Turn:
    """Lets those who were refused wait until somebody else is through."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def pass_on(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()


class Lifecycle:
    """One request from its first try to its end; asserts on the way that no token is wrong, lost or told twice."""

    def __init__(self, fabric: Fabric, name: str, request: Prompt, max_tokens: int, rng: Random) -> None:
        self.fabric, self.name, self.request, self.max_tokens, self.rng = fabric, name, request, max_tokens, rng
        self.shown: dict[int, int] = {}  # by position in the answer
        self.seen: Counter[str] = Counter()  # kinds of events and ends, for the account at the end
        self.time_remaining: float | None = None
        self.harm: list[tuple[int, str]] = []  # (after so many events, what)

    @property
    def known(self) -> int:
        """Leading tokens of the answer that were shown."""
        return next(index for index in range(len(self.shown) + 1) if index not in self.shown)

    async def run(self, turn: Turn) -> str:
        """The outcome: "done", or why not."""
        for number in range(MAX_TRIES):
            outcome = await Try(self, f"{self.name}.{number}").run()
            self.seen[outcome] += 1
            if self.known == self.max_tokens:
                return "done"
            if outcome in ("cancelled", "deadline"):
                return outcome
            if outcome == "no_capacity":
                await turn.wait()
        return "gave up"

    def show(self, position: int, token: int) -> None:
        index = position - len(self.request.tokens)
        told = f"{self.name}: token {token} at {index} of the answer to {len(self.request.tokens)} tokens"
        assert 0 <= index < self.max_tokens, told
        assert token == self.request.answer[index], f"{told}, where {self.request.answer[index]} is due"
        self.shown[index] = token


class Try:
    """One ticket: a reservation on a decode engine, and attempts by prefill engines. Moves add tickets to it, of which
    one is followed."""

    def __init__(self, life: Lifecycle, ticket: str) -> None:
        self.life, self.fabric, self.ticket, self.rng = life, life.fabric, ticket, life.rng
        self.inbox = life.fabric.inbox(ticket)
        self.followed = ticket
        self.leaving = Leaving(self, self.rng.choice)
        self.attempt = 1
        self.known = life.known  # of the answer, in the newest attempt's input
        self.running: dict[str, int] = {}  # prefill engines that have the ticket, and which attempt
        self.waiting: str | None = None  # where the newest attempt goes once it is armed
        self.starts: str | None = None  # where it starts once the older one there is gone
        self.held: int | None = None
        self.inputs: dict[int, int] = {}  # of each attempt: how much of the answer its input had
        self.ready = 0  # the attempt that came to its end
        self.cancelled = self.exhausted = False
        self.ended: Ended | Died | None = None
        self.told: list[int] = []  # by the decode engine
        self.events = 0

    def alive(self, role: str) -> list[str]:
        return [e.name for e in self.fabric.engines.values() if e.alive and e.settings.role == role]

    async def run(self) -> str:
        decodes, prefills = self.alive("decode"), self.alive("prefill")
        if not (decodes and prefills):
            return "no_capacity"
        self.decode, first = self.fabric[self.rng.choice(decodes)], self.rng.choice(prefills)
        if self.rng.random() < 0.5:
            self._reserve(first)
            self._start(first)
        else:
            self._start(first)
            self._reserve(first)
        try:
            async with asyncio.timeout(PATIENCE):
                while self.ended is None or self.running or self.leaving.places:
                    self._harm()
                    self.leaving.consider()
                    name, event = await self.inbox.get()
                    self.events += 1
                    self.life.seen[type(event).__name__] += 1
                    if not self.leaving.take(name, event):
                        (self._on_decode if name == self.decode.name else self._on_prefill)(name, event)
        except TimeoutError:
            raise AssertionError(f"{self.ticket} does not end: {vars(self)}") from None
        del self.fabric.inboxes[self.ticket]
        self.leaving.close()
        return self._outcome()

    def follow(self, ticket: str, decode: Engine) -> None:
        """A decode engine has taken the sequence over."""
        self.followed, self.decode = ticket, decode
        self.waiting = self.starts = None

    def _input(self, attempt: int) -> int:
        """How many tokens an attempt was given."""
        return len(self.life.request.tokens) + self.inputs[attempt]

    def _spec(self) -> SequenceSpec:
        self.inputs[self.attempt] = self.known
        return self.life.request.spec(self.known, self.life.max_tokens, self.life.time_remaining)

    def _reserve(self, peer: str) -> None:
        self.leaving.places[self.ticket] = self.decode.name
        self.decode.send(m.Reserve(self.ticket, self.attempt, self._spec(), peer))

    def _start(self, name: str) -> None:
        guess = self.rng.choice([0, len(self.life.request.tokens)]) if self.held is None else self.held
        self.running[name] = self.attempt
        self.fabric[name].send(m.StartPrefill(self.ticket, self.attempt, self._spec(), self.decode.name, guess))

    def _cancel(self, *names: str) -> None:
        for name in names:
            self.fabric[name].send(m.CancelTicket(self.ticket))

    def _cancel_decode(self) -> None:
        self.cancelled = True
        self.decode.send(m.CancelTicket(self.followed))

    def _harm(self) -> None:
        while self.life.harm and self.life.harm[0][0] <= self.events:
            _, what = self.life.harm.pop(0)
            if what == "rearm":
                self._rearm()
            if what == "move":
                self.leaving.wanted = True
            if what in ("cancel decode", "cancel both"):
                self._cancel_decode()
            if what in ("cancel prefill", "cancel both"):
                self._cancel(*self.running)

    def _rearm(self) -> None:
        """Ask for a newer attempt, by another prefill engine if there is one."""
        if self.ended is not None or self.cancelled or self.followed != self.ticket:
            return
        others = [name for name in self.alive("prefill") if name not in self.running] or self.alive("prefill")
        if self.attempt >= MAX_ATTEMPTS or not others or self.life.known >= self.life.max_tokens:
            self.exhausted = True
            self._cancel_decode()
            return
        if not self.told:  # what is told by the decode engine is no input of this ticket
            self.known = max(self.known, self.life.known)
        self.attempt += 1
        self.waiting, self.starts, self.held = self.rng.choice(others), None, None
        self.decode.send(m.Rearm(self.ticket, self.attempt, self._spec(), self.waiting))

    def _begin(self, name: str) -> None:
        """The newest attempt is armed: its prefill may start, where no older one is in its way."""
        self.starts = None
        if not self.fabric[name].alive or self.life.known >= self.life.max_tokens:  # or complete meanwhile
            self._rearm()
        elif name in self.running:
            self.starts = name
            self._cancel(name)
        else:
            self._start(name)

    def _on_decode(self, name: str, event: Event) -> None:
        match event:
            case m.ReservedPages(_, _, held):
                self.held = held
            case m.AttemptFailed(_, attempt, _):
                if attempt == self.attempt and self.waiting is None:
                    self._rearm()
            case m.Rearmed(_, attempt, held):
                assert attempt <= self.attempt
                if attempt == self.attempt and self.waiting is not None:
                    self.held, target, self.waiting = held, self.waiting, None
                    self._begin(target)
            case m.AlreadyReady(_, attempt, token):
                assert attempt == self.ready
                self.waiting = None
                self.life.show(self._input(attempt), token)
            case m.TicketReady(_, attempt, _):
                assert not self.ready, f"{self.ticket}: ready twice"
                self.ready = attempt
            case TokenOut(_, position, token, _):
                due = self.told[-1] + 1 if self.told else self._input(self.ready) + 1
                assert position == due, f"{self.ticket}: {position} came where {due} is due"
                self.told.append(position)
                self.life.show(position, token)
            case Ended() | Died():
                assert self.ended is None or isinstance(event, Died), f"{self.ticket}: {event} after {self.ended}"
                self.ended = self.ended or event
                self.waiting = self.starts = None
                self._cancel(*self.running)

    def _on_prefill(self, name: str, event: Event) -> None:
        match event:
            case TokenOut(_, position, token, _):
                self.life.show(position, token)
            case Ended() | Died():
                attempt = self.running.pop(name, None)
                if not isinstance(event, Died):
                    assert attempt is not None and event.reason not in _MISTAKES, f"{self.ticket}: {event} of {name}"
                if self.starts == name:
                    self._begin(name)
                elif self.ended is None and attempt == self.attempt and self.waiting is None:
                    self._on_attempt_over(event)
            case PromptDone():
                self.life.seen["pulled"] += event.pulled_tokens > 0
            case m.KvCommitted():
                pass

    def _on_attempt_over(self, event: Ended | Died) -> None:
        if self.life.known >= self.life.max_tokens and not self.told:  # its first token was its last
            self._cancel_decode()
        elif isinstance(event, Died) or not event.reason.answer_complete:
            self._rearm()

    def _outcome(self) -> str:
        if isinstance(self.ended, Died):
            return "died"
        assert self.ended is not None
        match self.ended.reason:
            case EndReason.CANCELLED:
                return "no_capacity" if self.exhausted else "cancelled"
            case EndReason.DEADLINE:
                return "deadline"
            case EndReason.LENGTH | EndReason.PREEMPTED | EndReason.NO_CAPACITY | EndReason.HANDED_OFF:
                return str(self.ended.reason)
        raise AssertionError(f"{self.ticket}: {self.ended}")
