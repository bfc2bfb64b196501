"""A whole measurement: find out who the target is, warm it up, run the load, judge the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pdserve.bench.cpu import cpu_seconds
from pdserve.bench.figures import Figures, Means
from pdserve.bench.load import Load, fitting
from pdserve.bench.plan import Measured, Plan, Search
from pdserve.bench.prompts import Prompts, plain_ids, tokenizer_ids
from pdserve.bench.rates import RateSearch
from pdserve.bench.record import Record
from pdserve.bench.runner import Runner
from pdserve.bench.strain import refusal
from pdserve.bench.target import Facts, Target, is_refusal
from pdserve.core.errors import ConfigError, PdserveError
from pdserve.simulator.workload import Arrival

WARMUP_STREAMS = 4


class Progress:
    """Told of what goes on. This one keeps it to itself."""

    def begin(self, name: str, requests: int) -> None:
        """A run of so many requests begins."""

    def ended(self, record: Record) -> None:
        """One of them has ended."""

    def note(self, text: str) -> None:
        """Something that whoever reads the figures should know."""


class Bench:
    """Measures one target. `prepare` comes first."""

    def __init__(self, target: Target, plan: Plan, progress: Progress | None = None) -> None:
        self._target, self._plan, self._progress = target, plan, progress or Progress()
        self._ids: Sequence[int] = ()
        self.facts = Facts("")

    async def prepare(self) -> None:
        """Ask the target who it is, and warm it up. Raises ConfigError for what it cannot be asked, PdserveError where
        a request of the warm-up fails: it is in no state to be measured. One that refuses some, and answers others, is:
        it keeps its targets so."""
        self.facts = await self._target.facts()
        for note in self.facts.notes:
            self._progress.note(note)
        self._ids = self._vocabulary()
        plan = self._plan
        arrivals = self._arrivals(plan.load, plan.seed, tell=True)
        cpu_seconds(plan.pids)  # a process that is not there is told now
        if not plan.warmup:
            return
        # Alike in length, with nothing in common with what will be measured.
        alike = [replace(one, at=0.0, block_ids=(), session=None) for one in arrivals[: plan.warmup]]
        runner = self._runner("warm-up", "warm-up/" + str(plan.seed), len(alike))
        streams = min(WARMUP_STREAMS, plan.load.streams or WARMUP_STREAMS)  # others may be measured at this moment
        errors = [record.error for record in (await runner.closed_loop(alike, streams)).records if record.error]
        if not errors:
            return
        said = f"{len(errors)} of {len(alike)} warm-up requests failed, the first with {errors[0]}"
        if len(errors) == len(alike) or not all(map(is_refusal, errors)):
            raise PdserveError(said)
        self._progress.note(said)

    async def measure(self, load: Load | None = None, seed: int | None = None) -> Measured:
        """Run a load, the plan's own unless told otherwise."""
        plan = self._plan
        load, seed = load or plan.load, plan.seed if seed is None else seed
        arrivals = self._arrivals(load, seed)
        name = f"{load.streams} streams" if load.streams else f"rate {load.rate:g}"
        runner = self._runner(name, seed, len(arrivals))
        before = cpu_seconds(plan.pids) if plan.pids else 0.0
        if load.streams is not None:
            run = await runner.closed_loop(arrivals, load.streams)
        else:
            run = await runner.open_loop(arrivals)
        used = self._used(before)
        refused = refusal(run.strain, plan.targets)
        means = Means(plan.gpus or self.facts.gpus, plan.cores, used)
        figures = None if refused else Figures.of(run.records, run.seconds, plan.targets, means)
        return Measured(load, seed, run.records, run.strain, figures, refused)

    async def find_rate(
        self, attainment: float, precision: float, most_runs: int, told: Callable[[Measured], None] = lambda _: None
    ) -> Search:
        """The highest rate at which `attainment` of all requests keep both targets. Each run has a seed of its own (the
        plan's, plus one for each run before it), since the target may have cached what it was asked; `told` gets each.
        A run that is refused is made again; the second in a row ends the search: this client offers no more."""
        load, runs = self._plan.load, list[Measured]()
        if load.rate is None:
            raise ConfigError("a rate is found by an open loop: --rate says where to begin")
        search, early = RateSearch(load.rate, precision, most_runs), None
        while (rate := search.next()) is not None:
            run = await self.measure(load.at_rate(rate), self._plan.seed + len(runs))
            runs.append(run)
            told(run)
            if run.figures is None:
                if len(runs) > 1 and runs[-2].figures is None:
                    early = run.refused
                    break
                continue
            search.take(rate, run.figures.attainment >= attainment)
        if early is None and not search.exact:
            early = f"{most_runs} runs were not enough"
        return Search(attainment, precision, runs, search, early)

    def _used(self, before: float) -> float | None:
        """CPU time since it was `before`; None where nobody asked, or where a process has gone with what it used."""
        if not self._plan.pids:
            return None
        try:
            return cpu_seconds(self._plan.pids) - before
        except ConfigError as error:
            self._progress.note(f"no CPU time: {error}")
            return None

    def _runner(self, name: str, seed: int | str, requests: int) -> Runner:
        self._progress.begin(name, requests)
        return Runner(self._target, Prompts(seed, self._ids), self._plan.timeout, self._progress.ended)

    def _arrivals(self, load: Load, seed: int, *, tell: bool = False) -> list[Arrival]:
        made = load.arrivals(seed)
        found = fitting(made, self.facts.max_model_len)
        if len(found) == len(made):
            return made
        said = f"{len(made) - len(found)} of {len(made)} requests need more than {self.facts.max_model_len} tokens"
        if not self._plan.drop_long or not found:
            hint = "; --drop-long leaves them out" if found else ""
            raise ConfigError(f"{said}, which is all that {self.facts.model} has room for{hint}")
        if tell:
            self._progress.note(f"{said} and are left out")
        return found

    def _vocabulary(self) -> Sequence[int]:
        plan = self._plan
        if plan.tokenizer is not None:
            return tokenizer_ids(plan.tokenizer)
        size = plan.vocab or self.facts.vocab_size
        if size is None:
            raise ConfigError("this target does not tell its vocabulary: --vocab says its size, or --tokenizer has it")
        return plain_ids(size)
