"""What a placement would cost, in seconds, from what workers say of their own speed."""

from __future__ import annotations

from typing import NamedTuple

from pdserve.policy.batching import JOINING, LEAST, SHARE
from pdserve.policy.estimate import Speed
from pdserve.policy.fleet import PlacementRequest, Target, WorkerView

# Bytes a second of a link that was not measured yet: a 10 Gbit/s network.
UNMEASURED_LINK = 1.25e9
HANDOFF = 2e-3  # seconds from the last layer's KV to the answer's place in a batch, beside the bytes
# Up to such a factor slower than the fastest, workers count as equals: so much is noise of their measures.
ALIKE = 1.5


class PromptTime(NamedTuple):
    """Where a first token's seconds would go: behind others, and in computing."""

    queue: float
    compute: float

    @property
    def total(self) -> float:
        return self.queue + self.compute


def prompt_time(worker: WorkerView, request: PlacementRequest, speed: Speed, held: int) -> PromptTime:
    """For `request` on `worker`, which has `held` of its leading tokens, behind all prompts that are there or bound
    for there."""
    queue = _queue_seconds(worker, speed, done_seconds(worker, request.now, speed)) if worker.queued_tokens else 0.0
    return PromptTime(queue, compute_seconds(worker, request, speed, held))


def done_seconds(worker: WorkerView, now: float, speed: Speed) -> float:
    """What is done of the step under way, which its report does not show: its tokens all count as waiting until its
    end. No more than what the cheapest step of so many tokens takes: a worker that was stopped is not through."""
    waiting, past = worker.reported_prefill_tokens, now - worker.step_since
    if not waiting or past <= 0.0:
        return 0.0
    chunk = waiting if waiting < worker.max_num_batched_tokens else worker.max_num_batched_tokens
    step = speed.prompt_seconds(chunk, chunk * chunk, chunk)
    return past if past < step else step


def leveled(own: float, fastest: float) -> float:
    """What to choose a worker by that would take `own` seconds by its own measure, and `fastest` at the speed of the
    fastest of its fleet: those that are alike in speed are told apart by what they have to do.

    A batch that grows by one costs an answer little, often less than two measurements of one speed differ by. By their
    own measures the worker that is thought to be fastest would get everything, up to where it is not, and the others
    nothing to measure themselves again by. Whether a target is kept is for its own measure to say in any case.
    """
    return fastest if own <= ALIKE * fastest else own


def leveled_time(
    worker: WorkerView, request: PlacementRequest, speed: Speed, fastest: Speed, held: int
) -> tuple[PromptTime, float]:
    """`prompt_time` by the worker's own `speed`, and the seconds to choose it by (see `leveled`). A decision asks this
    of every worker that it looks at."""
    compute = compute_seconds(worker, request, speed, held)
    level = compute_seconds(worker, request, fastest, held)
    if not worker.queued_tokens:
        return PromptTime(0.0, compute), leveled(compute, level)
    done = done_seconds(worker, request.now, speed)
    queue = _queue_seconds(worker, speed, done)
    return PromptTime(queue, compute), leveled(queue + compute, _queue_seconds(worker, fastest, done) + level)


def _queue_seconds(worker: WorkerView, speed: Speed, done: float) -> float:
    """For all prompts that are on `worker` or bound for there, of which so many seconds are `done`."""
    seconds = speed.prompt_seconds(worker.queued_tokens, worker.queued_squares, worker.max_num_batched_tokens) - done
    return seconds if seconds > 0.0 else 0.0


def compute_seconds(worker: WorkerView, request: PlacementRequest, speed: Speed, held: int) -> float:
    """For `request` on `worker` alone, which has `held` of its leading tokens."""
    tokens = request.tokens
    return speed.prompt_seconds(tokens - held, tokens * tokens - held * held, worker.max_num_batched_tokens)


def stretch(worker: WorkerView, request: PlacementRequest, answers: Speed, prompts: Speed) -> float | None:
    """How many times as long a prompt takes on a decode worker beside the answers that are there, where it computes the
    prompt in chunks that keep every one of them within its target (`batching.plan_step`). By its speed of `answers`
    and of `prompts`.

    None: some would feel it. Nobody asked gaps for them or for this one, or the least chunk is too long. Of the others'
    targets it is not known how short they are; they count as this one's."""
    if not worker.answers:
        return 1.0
    if worker.unbounded or Target.ITL not in request.stated:
        return None
    limit, gap = SHARE * request.targets.itl, answers.decode_seconds(worker.answers, worker.load)
    least = LEAST * prompts.token
    chunk = max(JOINING * limit - gap, least)
    return (gap + chunk) / chunk if chunk > 0 and gap + least < limit else None


def gap_after(
    worker: WorkerView,
    request: PlacementRequest,
    speed: Speed,
    seconds: float = 0.0,
    joining: float = 0.0,
    joining_tokens: float = 0.0,
) -> float:
    """Between two tokens of every answer of `worker`, once `request` has joined them in `seconds`.

    Until then some will have ended: of answers of one expected length, whose ages are spread evenly, a share of
    seconds / (length x gap). So predicts Mooncake (FAST 2025, section 6): what matters is the load when the prompt is
    through, not the load now. `joining` are others that will have joined by then, one after the other, with
    `joining_tokens` of context in all; of these only the last that fit into an answer's time will still be there.
    """
    running, context = worker.answers, worker.load
    if seconds and request.expected and (running or joining):
        lifetime = request.expected * speed.decode_seconds(running, context)
        left, still = (1 - seconds / lifetime, 1.0) if seconds < lifetime else (0.0, lifetime / seconds)
        running = round(running * left + joining * still)
        context = round(context * left + joining_tokens * still)
    else:
        running, context = round(running + joining), round(context + joining_tokens)
    return speed.decode_seconds(running + 1, context + request.tokens)


def transfer_tail(prefill: WorkerView, decode: WorkerView, missing: int, compute: float) -> float:
    """What of moving `missing` tokens' KV shows: layers leave while the next ones compute, so the last layer's part,
    or what the link needs longer than computing takes."""
    seconds = link_seconds(prefill, decode, missing)
    return HANDOFF + max(seconds / prefill.layout.num_layers, seconds - compute)


def link_seconds(sender: WorkerView, receiver: WorkerView, tokens: int) -> float:
    """For the KV of `tokens` over the pair's link, as measured."""
    link = sender.links.get(receiver.worker_id)
    rate = link.bytes_per_second if link is not None and link.bytes_per_second else UNMEASURED_LINK
    return tokens * sender.layout.token_bytes / rate
