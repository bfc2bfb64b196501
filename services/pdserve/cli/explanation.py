"""One request's decisions for people: a sentence each, its candidates below. Values in, rich text out."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from itertools import zip_longest

from rich.text import Text

from pdserve.cli.candidates import legend, say_ms, shown, table
from pdserve.client import Decision, DecisionKind, Explanation, RequestSummary

CLOSE = 0.25  # a prediction that was off by no more than this was good
INDENT = "  "
_WAITING = (DecisionKind.WAIT, DecisionKind.DEFER)


def explanation(found: Explanation, width: int, *, ascii_only: bool = False) -> Iterator[Text]:
    """What to print, in order; looks well on 80 columns and more."""
    yield from summary(found)
    later = [decision.first_ns for decision in found.decisions[1:]]
    for index, (decision, until) in enumerate(zip_longest(found.decisions, later)):
        if index == 1 and found.dropped:
            yield Text(f"\n({found.dropped} more, which the router had no room for)", style="dim")
        yield Text()
        yield from sentences(decision, found.request, until, width)
        if decision.candidates:
            for line in table(decision, width - len(INDENT), ascii_only=ascii_only):
                yield Text(INDENT, no_wrap=True).append_text(line)
    if not found.decisions:
        yield Text("\nno decision yet", style="dim")
    for rest in (legend([row for decision in found.decisions for row in shown(decision)]), compared(found)):
        lines = list(rest)
        if lines:
            yield Text()
            yield from lines


def summary(found: Explanation) -> Iterator[Text]:
    """What the request was, and what it was promised."""
    request, usage = found.request, found.request.usage
    state = request.finish_reason.value if request.finish_reason else request.code.lower() or request.state.value
    since = "for" if request.state.value == "running" else "after"
    head = f"request {request.request_id}, {request.model}: {state} {since} {say_ms(request.duration_ms)}"
    yield Text(head, style="bold red" if request.code else "bold")
    if request.error:
        yield Text(request.error, style="red")
    yield Text(f"tokens {usage.prompt_tokens} in ({usage.cached_tokens} cached), {usage.completion_tokens} out")
    if found.decisions:
        last = found.decisions[-1]
        whose = "as asked for" if last.targets_stated else "the deployment's own"
        first, gap = f"{last.ttft_target_ms:g} ms", f"{last.itl_target_ms:g} ms"
        yield Text(f"targets {first} to the first token, {gap} between tokens ({whose})")


def sentences(decision: Decision, request: RequestSummary, until: int | None, width: int) -> Iterator[Text]:
    """What was decided, and below it the rule that won. `until`: when the next decision was made."""
    at = f"+{say_ms((decision.first_ns - request.arrived_ns) / 1e6)}"
    looks = f" (x {decision.count})" if decision.count > 1 else ""
    reason = Text(textwrap.fill(decision.reason, width, initial_indent=INDENT, subsequent_indent=INDENT))
    if decision.kind not in _WAITING:
        style = "bold green" if decision.placed else "bold red"
        yield Text.assemble((at, "dim"), INDENT, (_said(decision), style), looks)
        yield reason
        return
    if until is None:
        over = request.arrived_ns + round(1e6 * request.duration_ms)
        until = max(over, decision.last_ns)
    waited = f"waited {say_ms((until - decision.first_ns) / 1e6)}"
    if decision.kind is DecisionKind.WAIT:
        yield Text.assemble((at, "dim"), INDENT, (waited, "bold yellow"), f": {decision.reason}{looks}")
    else:
        yield Text.assemble((at, "dim"), INDENT, (f"{waited} for {decision.prefill_worker}", "bold yellow"), looks)
        yield reason


def _said(decision: Decision) -> str:
    prefill, decode = decision.prefill_worker, decision.decode_worker
    match decision.kind:
        case DecisionKind.REMOTE if decode:
            return f"remote: {prefill} computes the prompt, {decode} the answer"
        case DecisionKind.REMOTE:
            return f"remote: {prefill} goes on with the prompt, the reservation stands"
        case DecisionKind.LOCAL:
            why = f" ({decision.local_reason.value.replace('_', ' ')})" if decision.local_reason else ""
            return f"local{why}: {decode} computes prompt and answer"
        case DecisionKind.PREFILL_ONLY:
            return f"prefill only: {prefill} computes the only token"
        case DecisionKind.DOWN:
            return "given up: nobody is up"
        case DecisionKind.NEVER:
            return "refused: no worker could ever take it"
        case DecisionKind.REJECT:
            return "rejected: it would come too late"
    return decision.kind.value


def compared(found: Explanation) -> Iterable[Text]:
    """Prediction and outcome side by side, below one another; nothing where nothing was placed."""
    deciding, request = found.deciding, found.request
    if deciding is None:
        return
    chosen = deciding.chosen if deciding.chosen is not None and deciding.chosen.measured else None
    yield Text(f"{'':<14}{'predicted':>11}{'was':>11}", style="dim")
    first = _pair("first token", chosen.ttft_ms if chosen else None, found.ttft_ms)
    if request.ttft_ms is not None:
        first.append(f"  {say_ms(request.ttft_ms)} after its arrival", "dim")
    yield first
    if deciding.kind is not DecisionKind.PREFILL_ONLY:
        gaps = request.itl
        mean = _pair("between tokens", chosen.gap_ms if chosen else None, gaps.mean_ms if gaps.count else None)
        if gaps.count:
            mean.append(f"  mean; p99 {say_ms(gaps.p99_ms)}, at most {say_ms(gaps.max_ms)}", "dim")
        yield mean


def _pair(name: str, predicted: float | None, actual: float | None) -> Text:
    """Both in milliseconds, and how far the second is from the first."""
    line = Text(no_wrap=True).append(f"{name:<14}")
    line.append(f"{'-' if predicted is None else say_ms(predicted):>11}")
    line.append(f"{'-' if actual is None else say_ms(actual):>11}", "bold")
    if predicted and actual is not None:
        off = actual / predicted - 1
        line.append(f"{off:>+7.0%}", "green" if abs(off) <= CLOSE else "yellow")
    return line
