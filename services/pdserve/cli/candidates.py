"""What a decision was chosen from, as a table: a line each, best first. Values in, rich text out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.text import Text

from pdserve.client import Candidate, Decision

WAITS_SHOWN = 3  # candidates of a decision that sent the request nowhere
WIDE = 100  # columns; from there on cost and bars have room
BAR = 12
LEAST_NAME, MOST_NAME = 7, 24
STYLES = {"queue": "yellow", "compute": "cyan", "transfer": "magenta"}
NUMBERS = {"cached": 7, "queue": 8, "compute": 9, "transfer": 10, "= ms": 8, "ms/token": 10}
COST = {"cost": 6}
MARKS = {"!": "misses its target, with the wait so far", "~": "not measured yet"}


def shown(decision: Decision) -> tuple[Candidate, ...]:
    """The candidates that have a line."""
    return decision.candidates if decision.placed else decision.candidates[:WAITS_SHOWN]


def table(decision: Decision, width: int, *, ascii_only: bool = False) -> Iterator[Text]:
    """The lines, each at most `width` characters (78 and more look well). What was chosen is marked; queue, compute and
    transfer make the time to first token, in milliseconds."""
    listed, wide = shown(decision), width >= WIDE
    numbers = NUMBERS | COST if wide else NUMBERS
    room = width - 4 - sum(numbers.values()) - (BAR + 2 if wide else 0)
    widths = _name_widths(listed, room)
    head = Text(f"  {'prefill':<{widths[0]}} {'decode':<{widths[1]}}", style="dim", no_wrap=True)
    for name, size in numbers.items():
        head.append(f"{name:>{size}}", STYLES.get(name, ""))
    yield head
    longest = max((candidate.ttft_ms for candidate in listed), default=0.0)
    for candidate in listed:
        won = candidate is decision.chosen
        line = Text(style="bold" if won else "", no_wrap=True)
        line.append((">" if ascii_only else "▸") if won else " ", "green")
        names = candidate.prefill_worker or ("local" if candidate.local_reason else ""), candidate.decode_worker
        for name, size in zip(names, widths, strict=True):
            line.append(f" {cut(name or '-', size):<{size}}")
        for (text, style), size in zip(_figures(candidate), numbers.values(), strict=False):
            line.append(f"{text:>{size}}", style)
        if wide:
            line.append("  ").append_text(bar(candidate, longest, ascii_only=ascii_only))
            said = note(candidate)
            if len(line) + 2 + len(said) <= width:
                line.append(f"  {said}", "yellow")
        line.rstrip()
        yield line
    if decision.considered > len(listed):
        yield Text(f"  and {decision.considered - len(listed)} more", style="dim")


def legend(listed: Iterable[Candidate]) -> Iterator[Text]:
    """What the marks in tables of these candidates mean, where there are any."""
    texts = "".join(text for candidate in listed for text, _ in _figures(candidate))
    used = [f"{mark} {meaning}" for mark, meaning in MARKS.items() if mark in texts]
    if used:
        yield Text("   ".join(used), style="dim")


def _name_widths(listed: Iterable[Candidate], room: int) -> tuple[int, int]:
    """Of the two columns with worker ids: what they need, as far as there is room."""
    most = max(LEAST_NAME, min(MOST_NAME, room // 2))
    prefill, decode = LEAST_NAME, LEAST_NAME
    for candidate in listed:
        prefill, decode = max(prefill, len(candidate.prefill_worker)), max(decode, len(candidate.decode_worker))
    return min(most, prefill), min(most, decode)


def _figures(candidate: Candidate) -> list[tuple[str, str]]:
    """The cells behind the names, with their styles; the cost is the last."""
    assumed = "" if candidate.measured else "~"
    first, gap = f"{assumed}{figure(candidate.ttft_ms)}", f"{assumed}{figure(candidate.gap_ms)}"
    return [
        (str(candidate.cached_tokens), ""),
        *((figure(ms), "") for ms in (candidate.queue_ms, candidate.compute_ms, candidate.transfer_ms)),
        (f"{first}!", "yellow") if candidate.late else (first, ""),
        ("-", "") if not candidate.decode_worker else (f"{gap}!", "yellow") if candidate.slow else (gap, ""),
        (f"{candidate.cost:.2f}", ""),
    ]


def note(candidate: Candidate) -> str:
    """What speaks against it."""
    said = []
    if candidate.late:
        said.append(f"late {candidate.late:.0%}")
    if candidate.slow:
        said.append(f"slow {candidate.slow:.0%}")
    if candidate.tight:
        said.append("tight")
    if not candidate.accepts:
        said.append("full")
    return ", ".join(said)


def bar(candidate: Candidate, longest: float, *, ascii_only: bool) -> Text:
    """Queue, compute and transfer on one scale, BAR characters for `longest`, in the colours of their columns."""
    text, at, drawn = Text(), 0.0, 0
    for name, style in STYLES.items():
        at += getattr(candidate, f"{name}_ms")
        cells = round(BAR * at / longest) - drawn if longest > 0 else 0
        text.append((name[0] if ascii_only else "━") * cells, style)
        drawn += cells
    return text.append(" " * (BAR - drawn))


def cut(name: str, width: int) -> str:
    """A name that fits. Its end tells it from its neighbours', so the middle goes."""
    if len(name) <= width:
        return name
    tail = width // 2
    return f"{name[: width - tail - 1]}~{name[-tail:]}"


def figure(ms: float) -> str:
    """Milliseconds in at most seven characters, up to hours."""
    return f"{ms:.1f}" if ms < 10_000 else f"{ms:.0f}"


def say_ms(value: float) -> str:
    """A time in milliseconds, in a unit that reads well."""
    if abs(value) < 999.95:
        return f"{value:.1f} ms"
    return f"{value / 1e3:.2f} s" if abs(value) < 9_995 else f"{value / 1e3:.1f} s"
