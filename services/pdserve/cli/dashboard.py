"""What `pdserve top` shows: a look at a fleet as rich renderables. Asks nobody anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pdserve.cli.view import View, WorkerRates, state_of
from pdserve.client import FleetWorker, LatencyStats, ModelStats, Stats
from pdserve.core.fabric import say_bytes, say_rate

ROLES = ("prefill", "decode", "prefix_cache")
WIDE = 110  # columns from which numbers stand beside the bars
SHORTEST, LONGEST = 12, 32  # bars, in characters
NAME = 12  # the least that a worker's name has; longer ones are folded where there is no room
GAP = 2  # between columns
# Blocks by state: character on a terminal, in ASCII, style.
BLOCKS = (("owned", "█", "#", "green"), ("reserved", "▓", "%", "yellow"), ("cached", "▒", "+", "blue"))
FREE = ("░", ".", "dim")


def dashboard(view: View, width: int, *, ascii_only: bool = False) -> RenderableType:
    """The whole view, for a console of `width` columns."""
    parts: list[RenderableType] = [_title(view)]
    for model in view.stats.models:
        parts += [Text(), *_model(model, view.stats)]
        pools = list(_pools(model, view, wide=width >= WIDE))
        cells = min((pool.bar_cells(width) for pool in pools), default=0)  # alike in all, to be compared
        for pool in pools:
            parts += [Text(), pool.table(cells, ascii_only=ascii_only)]
    others = [worker for worker in view.fleet if not _of_a_model(worker, view.stats)]
    if others:
        parts += [Text(), _others(others)]
    links = list(_links(view))
    if links:
        parts += [Text(), _link_table(links)]
    return Group(*parts)


def pool_title(role: str, pool: Sequence[FleetWorker], rates: Mapping[str, WorkerRates]) -> str:
    """A pool in one line: who is up, how busy they are, and what waits."""
    up = [worker for worker in pool if worker.connected and not worker.draining]
    said = [f"{len(up)} of {len(pool)} up"]
    known = [rates[worker.worker_id] for worker in up if worker.worker_id in rates]
    if known:
        said.append(f"{sum(rate.busy for rate in known) / len(known):.0%} busy")
    if role == "prefill":
        pending = sum(worker.pending_prefill_tokens for worker in up)
        speed = sum(worker.prefill_tokens_per_second for worker in up)
        said.append(f"{pending} tokens to compute" + (f" ({pending / speed:.1f} s)" if speed and pending else ""))
    else:
        seats = sum(worker.max_num_seqs for worker in up)
        said.append(f"{sum(worker.running for worker in up)} of {seats} seats taken")
    used, total = sum(map(_used, up)), sum(worker.total_blocks for worker in up)
    if total:
        said.append(f"KV {used / total:.0%} used")
    return ", ".join(said)


def state(worker: FleetWorker) -> tuple[str, str]:
    """A worker's state in a word, and its style."""
    word = state_of(worker)
    return word, {"up": "green", "draining": "yellow"}.get(word, "red")


def kv_bar(worker: FleetWorker, cells: int, *, ascii_only: bool) -> Text:
    """The worker's blocks by state, on `cells` characters. What there is of a state, however little, gets one."""
    text, left = Text(), cells
    total = max(1, worker.total_blocks)
    for name, drawn, plain, style in BLOCKS:
        count: int = getattr(worker, f"{name}_blocks")
        share = min(left, max(1, round(count * cells / total))) if count else 0
        text.append((plain if ascii_only else drawn) * share, style)
        left -= share
    text.append((FREE[1] if ascii_only else FREE[0]) * left, FREE[2])
    return text


def _title(view: View) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("pdserve top", "bold")
    text.append(f"  {view.target}  {view.stats.router_id}  last {view.stats.window_seconds:.0f} s  ")
    text.append(f"{datetime.fromtimestamp(view.at):%H:%M:%S}", "dim")
    if view.problem:
        text.append(f"  no answer: {view.problem}", "bold red")
    return text


def _model(model: ModelStats, stats: Stats) -> list[RenderableType]:
    head = Text(no_wrap=True)
    head.append(model.model, "bold cyan")
    head.append(f"  {model.running} running, {model.waiting} of them waiting")
    judged = model.completed + model.failed
    kept = f" ({min(1.0, model.good / judged):.0%})" if judged else ""
    rates = Text(no_wrap=True, overflow="ellipsis")
    rates.append(f"{_rate(model.requests_per_second)} requests/s, goodput {_rate(model.goodput)}{kept}")
    rates.append(f", tokens/s {model.prompt_tokens_per_second:.0f} in {model.output_tokens_per_second:.0f} out")
    rates.append(f", cache hits {model.cache_hit_rate:.0%}")
    bad = [f"{getattr(model, what)} {what}" for what in ("failed", "cancelled", "replays") if getattr(model, what)]
    table = Table(box=None, padding=(0, GAP, 0, 0), header_style="dim")
    table.add_column("milliseconds")
    for name in ("p50", "p90", "p99", "max", "target", "mean", "count"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, latency, target in (
        ("first token", model.ttft, stats.ttft_target_ms),
        ("between tokens", model.itl, stats.itl_target_ms),
        ("queue", model.queue, 0.0),
    ):
        table.add_row(name, *_latency(latency, target))
    return [head, rates, *([Text(", ".join(bad), "red")] if bad else []), table]


def _rate(value: float) -> str:
    """A rate a second. One request in a minute is not none."""
    return f"{value:.2f}" if 0.0 < value < 0.095 else f"{value:.1f}"


def _latency(latency: LatencyStats, target: float) -> Iterator[Text]:
    """The cells of one latency, red where it is above its target (0: it has none)."""

    def cell(value: float) -> Text:
        missed = bool(target) and value > target
        return Text(f"{value:.1f}" if latency.count else "-", "red" if missed else "")

    yield from map(cell, (latency.p50_ms, latency.p90_ms, latency.p99_ms, latency.max_ms))
    yield Text(f"{target:.0f}" if target else "", "dim")
    yield Text(f"{latency.mean_ms:.1f}" if latency.count else "-")
    yield Text(str(latency.count))


@dataclass(frozen=True, slots=True)
class _Pool:
    """A pool's table: names of the columns before and behind the bars, and a row of texts for each worker."""

    title: str
    workers: Sequence[FleetWorker]
    before: Sequence[str]
    behind: Sequence[str]
    rows: Sequence[tuple[str, ...]]

    def bar_cells(self, width: int) -> int:
        """How long bars may be on a console of `width` columns, beside all else."""
        columns = zip(("worker".ljust(NAME), "state", *self.before, *self.behind), *self.rows, strict=True)
        taken = sum(max(map(len, column)) + GAP for column in columns)
        return max(SHORTEST, min(LONGEST, width - taken - GAP))

    def table(self, cells: int, *, ascii_only: bool) -> RenderableType:
        table = _table(self.title)
        table.add_column("worker", overflow="fold", min_width=NAME)
        table.add_column("state", no_wrap=True)
        for name in self.before:
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("KV", no_wrap=True, min_width=cells)
        for name in self.behind:
            table.add_column(name, justify="right", no_wrap=True)
        for worker, (name, word, *told) in zip(self.workers, self.rows, strict=True):
            before, behind = told[: len(self.before)], told[len(self.before) :]
            bar = kv_bar(worker, cells, ascii_only=ascii_only)
            style = "" if worker.connected else "dim"
            table.add_row(escape(name), Text(word, state(worker)[1]), *before, bar, *behind, style=style)
        return table


def _pools(model: ModelStats, view: View, *, wide: bool) -> Iterator[_Pool]:
    for role in ROLES[:2]:
        pool = [worker for worker in view.fleet if worker.role == role and worker.model == model.model]
        workers = sorted(pool, key=lambda worker: worker.worker_id)
        more = ("used", "cached", "free", "pending" if role == "prefill" else "preempted") if wide else ()
        if workers:
            yield _Pool(
                f"{role}: {pool_title(role, pool, view.rates)}",
                workers,
                ("run", "wait", "busy", "tokens/s", "hits"),
                ("", *more),
                [_row(worker, view.rates.get(worker.worker_id), wide) for worker in workers],
            )


def _row(worker: FleetWorker, rate: WorkerRates | None, wide: bool) -> tuple[str, ...]:
    """A worker's cells, but for the bar."""
    hits = None if rate is None else rate.hits
    blocks = (_used(worker), worker.cached_blocks, worker.free_blocks)
    own = worker.pending_prefill_tokens if worker.role == "prefill" else worker.preemptions
    return (
        worker.worker_id or worker.endpoint,
        state(worker)[0],
        str(worker.running),
        str(worker.waiting),
        "-" if rate is None else f"{rate.busy:.0%}",
        "-" if rate is None else f"{rate.tokens:.0f}",
        "-" if hits is None else f"{hits:.0%}",
        f"{_used(worker) / max(1, worker.total_blocks):.0%}",
        *(str(number) for number in (*blocks, own) if wide),
    )


def _used(worker: FleetWorker) -> int:
    """Blocks that nobody else can have."""
    return worker.owned_blocks + worker.reserved_blocks


def _others(workers: Sequence[FleetWorker]) -> RenderableType:
    """Prefix caches, and whoever has not said what it is, or serves a model that the router does not."""
    table = _table("others")
    for name in ("worker", "role", "state"):
        table.add_column(name, overflow="fold")
    for name in ("blocks", "sent", "received"):
        table.add_column(name, justify="right", no_wrap=True)
    for worker in sorted(workers, key=lambda worker: (worker.role, worker.worker_id)):
        word, style = state(worker)
        role = worker.role.replace("_", "-") + (f" of {worker.model}" if worker.model else "")
        table.add_row(
            escape(worker.worker_id or worker.endpoint),
            escape(role or "?"),
            Text(word, style),
            str(worker.cached_blocks),
            say_bytes(worker.kv_bytes_sent),
            say_bytes(worker.kv_bytes_received),
        )
    return table


def _links(view: View) -> Iterator[tuple[str, ...]]:
    """A row for each link's sending end."""
    for worker in sorted(view.fleet, key=lambda worker: worker.worker_id):
        rates = view.rates.get(worker.worker_id)
        for link in worker.links if worker.connected else ():
            rate = rates.links.get(link.peer) if rates else None
            if not (link.bytes_sent or worker.role == "prefill"):
                continue
            yield (
                f"{worker.worker_id} > {link.peer}",
                f"{link.transport}, {link.path}" + (" !" if link.degraded else ""),
                "-" if rate is None else say_rate(rate),
                say_rate(link.bytes_per_second) if link.bytes_per_second else "-",
                say_bytes(link.bytes_in_flight),
                say_bytes(link.bytes_sent),
            )


def _link_table(rows: Sequence[tuple[str, ...]]) -> RenderableType:
    table = _table("links")
    for name in ("from > to", "over"):
        table.add_column(name, overflow="fold")
    for name in ("now", "measured", "in flight", "sent"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _table(title: str) -> Table:
    return Table(title=Text(title, "bold"), title_justify="left", box=None, padding=(0, GAP, 0, 0), header_style="dim")


def _of_a_model(worker: FleetWorker, stats: Stats) -> bool:
    return worker.role in ROLES[:2] and any(worker.model == model.model for model in stats.models)
