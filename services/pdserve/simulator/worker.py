"""A worker under the virtual clock: pages, a batch, and steps that take what the cost model says.

It admits and batches by the functions that engines use (`policy.reservation`, `policy.batching`, `core.blocks`). Steps
in which nothing but the same answers is decoded are taken together, as a run: nothing changes in between, and a run is
cut short at the end of the step in which something does.
"""

from __future__ import annotations

from collections.abc import Callable

from pdserve.core.blocks import BlockPool
from pdserve.core.errors import NoCapacity
from pdserve.core.layout import KVLayout
from pdserve.core.slo import Outcome
from pdserve.policy.batching import Claim, Joining, Work, choose_victim, plan_step
from pdserve.policy.estimate import SpeedEstimate, squares
from pdserve.policy.fleet import Role
from pdserve.policy.reservation import fits, reserved_tokens
from pdserve.simulator.costs import Chunk, CostModel
from pdserve.simulator.plan import WorkerLimits
from pdserve.simulator.request import Job, Request
from pdserve.simulator.run import Run

LONGEST_RUN = 1 << 30  # steps


class Worker:
    """`schedule(at, action)` is the clock's. `prefilled(job)` is called when a prompt is through, `finished(job)` when
    an answer is, `preempted(job)` when a job lost its pages; each at the end of a step, with the pages still held by
    the job in the first case only. `changed()` says that a router would be told something new. `speed` divides every
    duration; `estimate` learns it, as an engine's does. `itl_target` is what all answers ask for, None: nothing."""

    def __init__(
        self,
        worker_id: str,
        role: Role,
        layout: KVLayout,
        limits: WorkerLimits,
        cost: CostModel,
        schedule: Callable[[float, Callable[[float], None]], None],
        *,
        prefilled: Callable[[Worker, Job, float], None],
        finished: Callable[[Worker, Job, float], None],
        preempted: Callable[[Worker, Job, float], None],
        changed: Callable[[Worker], None],
        speed: float = 1.0,
        itl_target: float | None = None,
    ) -> None:
        self.worker_id, self.role, self.layout, self.limits = worker_id, role, layout, limits
        self.pool = BlockPool(limits.total_blocks)
        self.busy_seconds = 0.0
        self.steps = 0
        self.batched = 0  # answers' tokens, all steps
        self.preemptions = 0
        self.jobs: dict[int, Job] = {}
        self.running: list[Job] = []
        self.backlog = self.backlog_squares = 0  # prompt tokens that wait to be computed
        self.step_since = 0.0  # when the step under way began
        self.estimate = SpeedEstimate()
        self._cost, self._speed, self._schedule = cost, speed, schedule
        self.itl_target = itl_target
        self._joining = Joining()
        self._prefilled, self._finished, self._preempted, self._changed = prefilled, finished, preempted, changed
        self._step = 0  # the number of the step or run under way; an event of another number is stale
        self._busy = False
        self._run: Run | None = None

    def admit(self, request: Request, *, awaits_kv: bool, decodes: bool, fetches: int = 0) -> Job:
        """Give a request its pages. Raises NoCapacity, and changes nothing, where it does not fit.

        `awaits_kv`: all KV comes from elsewhere, and `start` says when. Of its leading tokens `fetches` come from
        elsewhere, as far as they are not here, and `fetched` says when.
        """
        size, given = self.layout.block_size, request.tokens
        if len(self.jobs) >= self.limits.max_num_seqs:
            raise NoCapacity(f"{len(self.jobs)} sequences are here already")
        wanted = reserved_tokens(given, request.remaining if decodes else 0, self.limits.lookahead_tokens)
        hits = self.pool.match(request.hashes[: given // size])
        if hits and not awaits_kv and len(hits) * size == given:
            hits.pop()  # the last token is computed in any case, for its logits
        fresh = self.layout.blocks_for(wanted) - len(hits)
        if not fits(fresh, self.pool.available_after(hits), self.limits.watermark_blocks, bool(self.jobs)):
            raise NoCapacity(f"{fresh} blocks wanted, {self.pool.available_after(hits)} available")
        self.pool.acquire(hits)
        held = len(hits) * size
        job = Job(request, given, given, held, hits + self.pool.allocate(fresh), len(hits), decodes)
        self.jobs[request.number] = job
        if awaits_kv:
            self._joining.announce(self.itl_target)
        else:
            job.fetching = max(0, min(fetches, (given - 1) // size * size) - held)
            self._await(held + job.fetching, given)
            if not job.fetching:
                self.running.append(job)
        self._changed(self)
        return job

    def fetched(self, job: Job, now: float, *, landed: bool = True) -> None:
        """What `job` waited for is here; or, unless it `landed`, has to be computed after all."""
        if landed:
            job.computed += job.fetching
            self._publish(job)
        else:
            self._await(job.computed, job.computed + job.fetching)
        job.fetching = 0
        self.running.append(job)
        self._changed(self)
        self.kick(now)

    def start(self, job: Job, now: float) -> None:
        """All KV of `job` has landed and the first token is known: it decodes from the next step on."""
        job.computed = job.goal
        job.length = job.goal + 1
        self._publish(job)
        self.running.append(job)
        self._changed(self)
        self.kick(now)

    def kick(self, now: float) -> None:
        """Something can be computed: begin a step, or cut the run under way at the end of its step."""
        if not self._busy:
            self._begin(now)
        elif self._run is not None:
            steps = self._run.steps_by(now)
            if steps < self._run.steps:
                self._run.steps = steps
                self._end_at(self._run.begin + self._run.until(steps), self._end_run)

    def release(self, job: Job) -> None:
        """Take a job off the books; its full blocks stay as cache."""
        self.pool.release(job.blocks)
        del self.jobs[job.request.number]
        if job in self.running:
            self.running.remove(job)
            if job.computed < job.goal:
                self._await(job.goal, job.computed)
        elif job.fetching:
            self._await(job.goal, job.computed + job.fetching)
        self._changed(self)

    def lose_all(self, now: float) -> list[Job]:
        """The worker died: its jobs, and nothing is left of its cache."""
        lost = list(self.jobs.values())
        self.jobs.clear()
        self.running.clear()
        self.backlog = self.backlog_squares = 0
        self.pool = BlockPool(self.limits.total_blocks)
        self._busy, self._run = False, None
        self._step += 1
        self._changed(self)
        return lost

    def _await(self, before: int, after: int) -> None:
        """Tokens `before` to `after` of a prompt wait to be computed; or no longer, where `after` is less."""
        self.backlog += after - before
        self.backlog_squares += after**2 - before**2

    def _begin(self, now: float) -> None:
        if not self.running:
            return
        self._grow(now)
        prompts = [job for job in self.running if job.computed < job.goal]
        answers = [job for job in self.running if job.computed >= job.goal]
        if not prompts:
            if answers:
                self._begin_run(answers, now)
            return
        if self.limits.whole_prompts:
            batch, answers = self._whole(prompts), []
        else:
            work = [Work(1, False, job.computed, self.itl_target) for job in answers]
            work += [Work(job.goal - job.computed, True, job.computed) for job in prompts]
            budget, joining = self.limits.max_num_batched_tokens, self._joining.next()
            counts = plan_step(work, budget, self.estimate.speed, joining)[len(answers) :]
            batch = [(job, count) for job, count in zip(prompts, counts, strict=True) if count]
        chunks: list[Chunk] = [(job.computed, count) for job, count in batch]
        for job, _ in batch:
            job.began = now if job.began < 0 else job.began
        context = sum(job.computed for job in answers)
        seconds = self._cost.step(chunks, len(answers), context) / self._speed
        self._account(seconds, 1, len(answers))
        seen = sum(count for _, count in batch), squares(chunks), len(answers), context, seconds
        self.step_since = now
        self._end_at(now + seconds, lambda at: self._end_mixed(batch, answers, seen, at))

    def _whole(self, prompts: list[Job]) -> list[tuple[Job, int]]:
        batch: list[tuple[Job, int]] = []
        budget = self.limits.max_num_batched_tokens
        for job in prompts:
            count = job.goal - job.computed
            if batch and count > budget:
                break
            batch.append((job, count))
            budget -= count
        return batch

    def _begin_run(self, answers: list[Job], now: float) -> None:
        context = sum(job.computed for job in answers)
        first = self._cost.step((), len(answers), context) / self._speed
        second = self._cost.step((), len(answers), context + len(answers)) / self._speed
        size = self.layout.block_size
        # Until the first one ends, or has to grow beyond its pages.
        steps = min(min(job.request.remaining, len(job.blocks) * size - job.length + 1) for job in answers)
        self._run = Run(now, first, second - first, max(1, min(steps, LONGEST_RUN)), answers, context)
        self._end_at(now + self._run.until(self._run.steps), self._end_run)

    def _end_at(self, at: float, action: Callable[[float], None]) -> None:
        self._busy = True
        self._step += 1
        number = self._step

        def end(now: float) -> None:
            if number == self._step:
                action(now)

        self._schedule(at, end)

    def _end_mixed(
        self, batch: list[tuple[Job, int]], answers: list[Job], seen: tuple[int, int, int, int, float], now: float
    ) -> None:
        self._busy = False
        self.estimate.observe(*seen)
        through = []
        for job, count in batch:
            if self.jobs.get(job.request.number) is not job:
                continue  # its other half was lost meanwhile
            self._await(job.computed + count, job.computed)
            job.computed += count
            self._publish(job)
            if job.computed == job.goal:
                through.append(job)
        for job in answers:
            job.request.gaps.append((now - job.request.last_at, 1))
            self._advance(job, 1, now)
        for job in through:
            self._first_token(job, now)
        self._changed(self)
        if not self._busy:  # unless somebody kicked
            self._begin(now)

    def _first_token(self, job: Job, now: float) -> None:
        request = job.request
        if request.first_at < 0:
            request.first_at = now
        else:
            request.gaps.append((now - request.last_at, 1))
        request.last_at = now
        request.produced += 1
        job.length += 1
        if request.remaining <= 0:
            self._finish(job, now)
        elif job.decodes:
            self._prefilled(self, job, now)
        else:
            self.running.remove(job)  # its pages are read by the link
            self._prefilled(self, job, now)

    def _end_run(self, now: float) -> None:
        run, self._run, self._busy = self._run, None, False
        assert run is not None
        if run.steps:
            self._account(run.until(run.steps), run.steps, len(run.answers))
            # One step of a run tells as much as all: they lie on one line.
            answers, last = len(run.answers), run.steps - 1
            self.estimate.observe(0, 0, answers, run.context + last * answers, run.first + last * run.growth)
            shared, rest = run.gaps(0), run.gaps(1)
            for job in run.answers:
                waited = run.begin - job.request.last_at
                job.request.gaps += [(waited + run.first, 1), *rest] if waited > 0 else shared
                self._advance(job, run.steps, now)
        self._changed(self)
        if not self._busy:
            self._begin(now)

    def _advance(self, job: Job, tokens: int, now: float) -> None:
        job.computed += tokens
        job.length += tokens
        job.request.produced += tokens
        job.request.last_at = now
        if job.request.remaining <= 0:
            self._finish(job, now)

    def _finish(self, job: Job, now: float) -> None:
        job.request.done_at, job.request.outcome = now, Outcome.ANSWERED
        self.release(job)
        self._finished(self, job, now)

    def _grow(self, now: float) -> None:
        for job in list(self.running):
            if job.request.number not in self.jobs:
                continue
            needed = self.layout.blocks_for(job.length) - len(job.blocks)
            while needed > 0 and self.pool.num_available < needed:
                claims = [Claim(0, other.request.number) for other in self.running]
                victim = self.running[choose_victim(claims)]
                self.preemptions += 1
                self.release(victim)
                self._preempted(self, victim, now)
                if victim is job:
                    break
            else:
                if needed > 0:
                    job.blocks += self.pool.allocate(needed)

    def _publish(self, job: Job) -> None:
        full = min(job.computed // self.layout.block_size, len(job.request.hashes))
        for index in range(job.published, full):
            self.pool.publish(job.blocks[index], job.request.hashes[index])
        job.published = max(job.published, full)

    def _account(self, seconds: float, steps: int, answers: int) -> None:
        self.busy_seconds += seconds
        self.steps += steps
        self.batched += steps * answers
