"""The engine: one loop's worth of model, pages and schedule. Prefill and decode are ways to use it, not two engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdserve.core.layout import KVLayout
from pdserve.core.sequence import EndReason, SequenceSpec
from pdserve.core.sequence import Sequence as EngineSequence
from pdserve.engine.outputs import ChunkDone, Ended, Load, PromptDone, TokenLogprobs, TokenOut
from pdserve.engine.runner import Runner
from pdserve.engine.sampler import SampledToken
from pdserve.engine.scheduler import Phase, Scheduled, Scheduler, SchedulerConfig
from pdserve.engine.warm_up import RUNS, Shape, timed_steps
from pdserve.policy.estimate import SpeedEstimate, squares

PREFILL_SAMPLE = 64  # tokens
PREFILL_WEIGHT = 0.3  # of the newest step

LayerListener = Callable[[Sequence[tuple[str, int]], int], None]


@dataclass(slots=True)
class Outputs:
    """What happened since the last `take_outputs`, each list in order of time; `seconds` of it went into steps."""

    tokens: list[TokenOut] = field(default_factory=list)
    ends: list[Ended] = field(default_factory=list)
    prompts: list[PromptDone] = field(default_factory=list)
    chunks: list[ChunkDone] = field(default_factory=list)
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.tokens or self.ends or self.prompts or self.chunks)


@dataclass(slots=True)
class _Clock:
    admitted: float
    started: float | None = None


class Engine:
    """Sequences in, tokens out; `step` is the whole of it.

    A sequence is added (it computes here), or awaits its KV and is then activated. One that `hands_off` leaves the
    batch after its first token and keeps its pages until `finish` is called. `on_layer(progress, layer)` hears in the
    layer loop that KV of `layer` exists up to the given number of tokens for each sequence that hands off.
    """

    def __init__(
        self,
        runner: Runner,
        layout: KVLayout,
        config: SchedulerConfig,
        on_layer: LayerListener | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock  # a steady one, in seconds: what deadlines and speeds go by
        self.scheduler = Scheduler(layout, runner.kv.num_blocks, config, runner.copy_block)
        self.steps = 0
        self.busy_seconds = 0.0
        self.computed_tokens = self.sampled_tokens = 0
        self.on_forward: Callable[[], None] | None = None  # called after the last layer of each step
        self.prefill_rate = 0.0  # prompt tokens a second in steps that compute prompts, smoothed; 0: none yet
        self._speed = SpeedEstimate()
        self._runner = runner
        self._on_layer = on_layer
        self._hands_off: set[str] = set()
        self._clocks: dict[str, _Clock] = {}
        self._order = 0
        self._outputs = Outputs()

    def warm_up(self, *, prompts: bool = True, answers: bool = True) -> None:
        """Make steps that nobody asked for, so that the first ones that somebody does are as fast as the others, and
        take in how long they took. Before anything is taken in; they are counted nowhere."""

        def expected(shape: Shape) -> float:
            return self._speed.expected(*shape.work)

        for shape, seconds in timed_steps(
            self._runner, self.scheduler.config, self.clock, expected, prompts=prompts, answers=answers
        ):
            for _ in range(RUNS):
                self._learn(*shape.work, seconds)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running)

    def add(self, ticket: str, spec: SequenceSpec, *, hands_off: bool = False) -> EngineSequence:
        """Take in a sequence that computes here. Raises NoCapacity."""
        sequence = self._admit(ticket, spec, awaits_kv=False, grows=not hands_off)
        if hands_off:
            self._hands_off.add(ticket)
        return sequence

    def reserve(self, ticket: str, spec: SequenceSpec) -> EngineSequence:
        """Take in a sequence whose KV will be written into its pages from outside. Raises NoCapacity."""
        return self._admit(ticket, spec, awaits_kv=True, grows=True)

    def extend(self, ticket: str, spec: SequenceSpec) -> EngineSequence:
        """Give a reserved sequence a longer input and the time that is left now. Raises NoCapacity, changing nothing;
        `spec` must begin with the input so far."""
        sequence, _ = self._require(ticket)
        self.scheduler.extend(sequence, spec)
        sequence.deadline = None if spec.time_remaining is None else self.clock() + spec.time_remaining
        return sequence

    def activate(self, ticket: str, first_token: int) -> None:
        """Let a reserved sequence run: all KV of its input is in its pages, and `first_token` follows it."""
        sequence, _ = self._require(ticket)
        self.scheduler.computed(sequence, sequence.num_given - sequence.num_computed)
        sequence.tokens.append(first_token)
        if reason := sequence.end_after(first_token, self.scheduler.config.max_model_len):
            self.finish(ticket, reason)
        else:
            self.scheduler.set_phase(sequence, Phase.RUNNING)

    def hands_off(self, ticket: str) -> bool:
        """Whether a link may read this sequence's pages until it is finished."""
        return ticket in self._hands_off

    def stop(self, ticket: str) -> None:
        """Take a sequence out of the batch for good; it keeps its pages until `finish`."""
        sequence, _ = self._require(ticket)
        self.scheduler.set_phase(sequence, Phase.CLOSING)

    def detach(self, ticket: str) -> EngineSequence:
        """Take a running sequence out of the batch between two steps: it keeps its pages, which hold KV of all its
        tokens but the last."""
        sequence, _ = self._require(ticket)
        self.scheduler.set_phase(sequence, Phase.SENDING_KV)
        return sequence

    def resume(self, ticket: str) -> None:
        """Let a sequence that was detached run on."""
        sequence, _ = self._require(ticket)
        self.scheduler.set_phase(sequence, Phase.RUNNING)

    def finish(self, ticket: str, reason: EndReason, detail: str = "") -> None:
        """Release a sequence's pages and say why. Nobody may read or write them any more."""
        sequence, _ = self._require(ticket)
        self.scheduler.release(sequence)
        self._forget(ticket)
        self._outputs.ends.append(Ended(ticket, reason, detail))

    def refuse(self, ticket: str, reason: EndReason, detail: str) -> None:
        """Say that a ticket was never taken in."""
        self._outputs.ends.append(Ended(ticket, reason, detail))

    def step(self) -> None:
        """Schedule, run, postprocess."""
        batch, preempted = self.scheduler.schedule(self._speed.speed)
        for sequence in preempted:
            self._forget(sequence.id)
            self._outputs.ends.append(Ended(sequence.id, EndReason.PREEMPTED, "the KV pool ran out of blocks"))
        if not batch:
            return
        began = time.time_ns()
        self._start_clocks(batch)
        started = self.clock()
        sampled = self._runner.run(batch, self._layer_hook(batch), self.on_forward)
        seconds = self.clock() - started
        self._count(batch, sampled, seconds)
        self._measure(batch, seconds)
        self._postprocess(batch, sampled, began)

    def take_outputs(self) -> Outputs:
        outputs, self._outputs = self._outputs, Outputs()
        return outputs

    def load(self, kv_bytes_sent: int = 0, kv_bytes_received: int = 0) -> Load:
        """The state of the pool and the queues now."""
        scheduler = self.scheduler
        pool, reserved = scheduler.pool, scheduler.reserved_blocks()
        prefill = [(s.num_computed, s.pending) for s in scheduler.running if s.in_prefill]
        return Load(
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            owned_blocks=pool.num_owned - reserved,
            reserved_blocks=reserved,
            running=len(scheduler.running),
            waiting=len(scheduler) - len(scheduler.running),
            pending_prefill_tokens=sum(count for _, count in prefill),
            pending_prefill_squares=squares(prefill),
            bounded=sum(sequence.spec.itl_target is not None for sequence in scheduler),
            speed=self._speed.speed,
            steps=self.steps,
            preemptions=scheduler.preemptions,
            kv_bytes_sent=kv_bytes_sent,
            kv_bytes_received=kv_bytes_received,
            prefill_rate=round(self.prefill_rate, 1),
            busy_seconds=self.busy_seconds,
            computed_tokens=self.computed_tokens,
            sampled_tokens=self.sampled_tokens,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
        )

    def _admit(self, ticket: str, spec: SequenceSpec, *, awaits_kv: bool, grows: bool) -> EngineSequence:
        now = self.clock()
        deadline = None if spec.time_remaining is None else now + spec.time_remaining
        sequence = EngineSequence(ticket, spec, self._order, deadline=deadline)
        self.scheduler.admit(sequence, awaits_kv=awaits_kv, grows=grows)
        self._order += 1
        self._clocks[ticket] = _Clock(now)
        return sequence

    def _require(self, ticket: str) -> tuple[EngineSequence, Phase]:
        found = self.scheduler.get(ticket)
        if found is None:
            raise KeyError(f"no sequence {ticket} here")
        return found

    def _forget(self, ticket: str) -> None:
        self._hands_off.discard(ticket)
        self._clocks.pop(ticket, None)

    def _start_clocks(self, batch: Sequence[Scheduled]) -> None:
        now = self.clock()
        for scheduled in batch:
            if scheduled.sequence.in_prefill:
                clock = self._clocks[scheduled.sequence.id]
                clock.started = clock.started or now

    def _layer_hook(self, batch: Sequence[Scheduled]) -> Callable[[int], None] | None:
        """What the layer loop calls; None, so that it does nothing, where nothing of the batch hands off."""
        listener = self._on_layer
        progress = [
            (scheduled.sequence.id, scheduled.sequence.num_computed + scheduled.count)
            for scheduled in batch
            if scheduled.sequence.id in self._hands_off
        ]
        if not progress or listener is None:
            return None
        return lambda layer: listener(progress, layer)

    def _count(self, batch: Sequence[Scheduled], sampled: Sequence[SampledToken], seconds: float) -> None:
        self.steps += 1
        self.busy_seconds += seconds
        self._outputs.seconds += seconds
        self.computed_tokens += sum(scheduled.count for scheduled in batch)
        self.sampled_tokens += len(sampled)

    def _postprocess(self, batch: Sequence[Scheduled], sampled: Sequence[SampledToken], began: int) -> None:
        now, tokens = time.time_ns(), iter(sampled)
        for scheduled in batch:
            sequence, samples, prefill = scheduled.sequence, scheduled.samples, scheduled.sequence.in_prefill
            self.scheduler.computed(sequence, scheduled.count)
            if prefill:
                self._outputs.chunks.append(ChunkDone(sequence.id, began, now, scheduled.count))
            if samples:
                self._append(sequence, next(tokens), prefill)

    def _measure(self, batch: Sequence[Scheduled], seconds: float) -> None:
        """Take in how long a step took."""
        chunks = [(s.sequence.num_computed, s.count) for s in batch if s.sequence.in_prefill]
        count, answers = sum(count for _, count in chunks), [s.sequence for s in batch if not s.sequence.in_prefill]
        context = sum(sequence.num_computed for sequence in answers)
        self._learn(count, squares(chunks), len(answers), context, seconds)

    def _learn(self, count: int, pairs: int, answers: int, context: int, seconds: float) -> None:
        self._speed.observe(count, pairs, answers, context, seconds)
        # Of the rate of prompts short ones say little.
        if count >= PREFILL_SAMPLE and seconds > 0:
            known = self.prefill_rate or count / seconds
            self.prefill_rate = known + PREFILL_WEIGHT * (count / seconds - known)

    def _append(self, sequence: EngineSequence, sampled: SampledToken, prefill: bool) -> None:
        logprobs = None if sampled.logprob is None else TokenLogprobs(sampled.logprob, list(sampled.top))
        self._outputs.tokens.append(TokenOut(sequence.id, len(sequence.tokens), sampled.token, logprobs))
        sequence.tokens.append(sampled.token)
        reason = sequence.end_after(sampled.token, self.scheduler.config.max_model_len)
        if prefill:
            self._outputs.prompts.append(self._prompt_done(sequence, reason))
        if sequence.id in self._hands_off:
            # A link may still read its pages, also where the answer ends here: whoever runs the link finishes it.
            self.scheduler.set_phase(sequence, Phase.CLOSING if reason else Phase.SENDING_KV)
        elif reason:
            self.finish(sequence.id, reason)

    def _prompt_done(self, sequence: EngineSequence, end: EndReason | None) -> PromptDone:
        clock, now = self._clocks[sequence.id], self.clock()
        started = now if clock.started is None else clock.started
        blocks = sequence.num_cached // self.scheduler.layout.block_size
        return PromptDone(
            sequence.id, sequence.num_cached, blocks, started - clock.admitted, now - started, sequence.num_pulled, end
        )
