"""The plot of a simulation."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from pdserve.simulator import canvas
from pdserve.simulator.canvas import BLUE, DIM, GREEN, INK, KEPT, MISSED, Panel, Sheet, Table, draw_cdf, say
from pdserve.simulator.drawing import STAGES, Drawing
from pdserve.simulator.rows import LATENCIES, figure_rows, latency_rows

# Told apart in grey, too: light to dark along a request's way.
STAGE_COLOURS = ("#f2b866", "#e0681e", "#2f6fdb")
LABEL = "Latency distributions, how busy the workers were, requests in flight and targets kept over time"


def write(path: Path, drawing: Drawing) -> None:
    """Draw into FILE.png or FILE.html. Raises ConfigError where it cannot be written."""
    canvas.write(path, _sheet(drawing))


def _sheet(drawing: Drawing) -> Sheet:
    targets = drawing.targets
    kept = f"Kept both targets, by arrival ({drawing.report.attainment:.1%} of all)"
    panels = [
        Panel(0, slice(0, 2), "Time to first token", lambda axes: draw_cdf(axes, drawing.ttft, targets.ttft, BLUE)),
        Panel(0, slice(2, 4), "Gaps between tokens", lambda axes: draw_cdf(axes, drawing.itl, targets.itl, GREEN)),
        Panel(0, slice(4, 6), "Busy share of the time", lambda axes: _busy(axes, drawing)),
        Panel(1, slice(0, 3), "Requests in flight", lambda axes: _in_flight(axes, drawing)),
        Panel(1, slice(3, 6), kept, lambda axes: _attainment(axes, drawing)),
    ]
    latencies = latency_rows(drawing.report, drawing.tenants)
    tables: list[Table] = [(LATENCIES, latencies), ((), figure_rows(drawing.report, targets))]
    return Sheet(drawing.title, _subtitle(drawing), LABEL, panels, tables)


def _subtitle(drawing: Drawing) -> str:
    report, targets = drawing.report, drawing.targets
    gaps = f"{targets.itl_percentile:g}% of gaps within {say(targets.itl)}"
    within = f"both targets: first token within {say(targets.ttft)}, {gaps}"
    return f"{report.requests:,} requests answered in {report.seconds:,.0f} s; {report.attainment:.1%} kept {within}"


def _busy(axes: Axes, drawing: Drawing) -> None:
    """A bar to each pool's mean, a dot for each of its workers."""
    names = []
    for row, (name, shares) in enumerate(drawing.busy.items()):
        mean = sum(shares) / len(shares)
        names.append(f"{name}\n{mean:.0%}")
        axes.barh(row, mean, height=0.42, color=BLUE, alpha=0.28)
        axes.plot(shares, [row] * len(shares), "o", color=BLUE, markersize=5, alpha=0.65, markeredgewidth=0)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 1.0)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(visible=False, axis="y")


def _in_flight(axes: Axes, drawing: Drawing) -> None:
    axes.stackplot(drawing.times, drawing.in_flight, labels=STAGES, colors=STAGE_COLOURS, linewidth=0)
    axes.set_xlim(0, max(drawing.times[-1], 1e-9))
    axes.set_ylim(0, 1.22 * max(map(sum, zip(*drawing.in_flight, strict=True)), default=0) + 1)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
    axes.legend(loc="upper right", ncols=len(STAGES), fontsize=8.5, labelcolor=DIM, handlelength=1, borderaxespad=0)


def _attainment(axes: Axes, drawing: Drawing) -> None:
    """A bar for each window in which requests arrived, what missed on top, and a line for the share of all."""
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
    if not drawing.attainment:
        return
    width = 2 * drawing.attainment[0][0]
    for middle, share in drawing.attainment:
        if share is not None:
            axes.bar(middle, share, width=0.86 * width, color=KEPT)
            axes.bar(middle, 1 - share, bottom=share, width=0.86 * width, color=MISSED)
    axes.set_xlim(0, width * len(drawing.attainment))
    axes.axhline(drawing.report.attainment, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
