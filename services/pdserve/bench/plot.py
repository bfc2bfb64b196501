"""The plot of a measurement: distributions, every request over time, and attainment against rate."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from pdserve.bench.figures import Figures
from pdserve.bench.plan import Measured, Plan, Search
from pdserve.bench.report import LATENCIES, RUNS, figure_rows, latency_rows, run_rows
from pdserve.core.slo import Verdict
from pdserve.simulator import canvas
from pdserve.simulator.canvas import BLUE, DIM, GREEN, INK, RED, Panel, Sheet, Table, draw_cdf, say
from pdserve.simulator.drawing import Distribution

WAITING, STREAMING = "#f2b866", "#2f6fdb"
LABEL = "Latency distributions, a line for each request over time, and attainment against rate"


def write(path: Path, title: str, plan: Plan, run: Measured, search: Search | None = None) -> None:
    """Draw a run that has figures, and the `search` that it belongs to, into FILE.png or FILE.html. Raises ConfigError
    where it cannot be written."""
    assert run.figures is not None, "a run that was refused has nothing to draw"
    canvas.write(path, _sheet(title, plan, run, run.figures, search))


def _sheet(title: str, plan: Plan, run: Measured, figures: Figures, search: Search | None) -> Sheet:
    targets = plan.targets
    answered = [record for record in run.records if record.error is None]
    ttft = Distribution.of([(record.ttft or 0.0, 1) for record in answered], targets.ttft)
    itl = Distribution.of([(gap, 1) for record in answered for gap in record.gaps], targets.itl)
    gaps = f"p{targets.itl_percentile:g} of the gaps within {say(targets.itl)}"
    within = f"first token within {say(targets.ttft)}, {gaps}"
    subtitle = f"{figures.requests} requests in {figures.seconds:,.0f} s; {figures.attainment:.1%} kept both: {within}"
    half = slice(0, 3) if search else slice(0, 6)
    panels = [
        Panel(0, slice(0, 3), "Time to first token", lambda axes: draw_cdf(axes, ttft, targets.ttft, BLUE)),
        Panel(0, slice(3, 6), "Gaps between tokens", lambda axes: draw_cdf(axes, itl, targets.itl, GREEN)),
        Panel(1, half, "Each request, by when it was sent", lambda axes: _timeline(axes, run, plan)),
    ]
    tables: list[Table] = [(LATENCIES, latency_rows(figures)), ((), figure_rows(figures, targets))]
    if search is not None:
        found = search
        panels.append(Panel(1, slice(3, 6), "Kept both targets, by rate", lambda axes: _rates(axes, found)))
        tables.append((RUNS, run_rows(found)))
    return Sheet(title, subtitle, LABEL, panels, tables)


def _timeline(axes: Axes, run: Measured, plan: Plan) -> None:
    """A line for each request: waiting for its first token, then streaming; those that missed a target end in a dot."""
    spans: dict[str, list[list[tuple[float, float]]]] = {WAITING: [], STREAMING: []}
    missed = list[tuple[float, int]]()
    for row, record in enumerate(sorted(run.records, key=lambda record: record.at)):
        end = record.at + record.e2e
        first = end if record.ttft is None else record.at + record.ttft
        spans[WAITING].append([(record.at, row), (first, row)])
        spans[STREAMING].append([(first, row), (end, row)])
        if record.verdict(plan.targets) is not Verdict.MET:
            missed.append((end, row))
    width = max(0.6, min(3.0, 250 / len(run.records)))
    for colour, name in ((WAITING, "waiting"), (STREAMING, "streaming")):
        axes.add_collection(LineCollection(spans[colour], colors=colour, linewidths=width, label=name))
    if missed:
        x, y = zip(*missed, strict=True)
        axes.plot(x, y, "o", color=RED, markersize=3, markeredgewidth=0, label="missed")
    axes.set_xlim(0, max(record.at + record.e2e for record in run.records) or 1.0)
    axes.set_ylim(len(run.records), -1)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
    axes.legend(loc="lower left", fontsize=8.5, labelcolor=DIM, handlelength=1)


def _rates(axes: Axes, search: Search) -> None:
    """A dot for each run, and what was asked of it."""
    runs = [(run.load.rate or 0.0, run.figures.attainment) for run in search.runs if run.figures]
    x, y = zip(*sorted(runs), strict=True)
    axes.plot(x, y, "o-", color=BLUE, linewidth=1.6, markersize=5, markeredgecolor="white", markeredgewidth=0.8)
    axes.axhline(search.attainment, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    if search.state.passed is not None:
        axes.axvline(search.state.passed, color=GREEN, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.set_xlim(0, 1.08 * max(x))
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}/s"))
