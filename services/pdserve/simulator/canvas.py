"""Sheets of panels and tables: PNG, or an HTML page that needs nothing else. Loads matplotlib."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter

from pdserve.core.errors import ConfigError
from pdserve.simulator.drawing import PERCENTILES, Distribution

SIZE, HEADING, LEFT = (13.0, 7.9), 0.8, 0.05  # inches, inches of them for the title, share of the width
DPI = 150
WIDE = 8  # times the median: from there on a logarithmic axis shows more
INK, DIM, FAINT = "#1d2733", "#5f6b7a", "#e3e8ee"
BLUE, ORANGE, GREEN, RED = "#2f6fdb", "#e08a1e", "#2a9d6f", "#c8394b"
KEPT, MISSED = "#5fb595", "#f2d5d8"
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,  # a title is as it is
    "axes.edgecolor": DIM,
    "axes.labelcolor": DIM,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "xtick.color": DIM,
    "ytick.color": DIM,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "svg.hashsalt": "pdserve",  # the same figures give the same file
    "svg.fonttype": "none",
}
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
  body {{ margin: 2rem auto; max-width: 78rem; padding: 0 1rem; color: #1d2733; background: #fff;
          font: 15px/1.5 "DejaVu Sans", Verdana, system-ui, sans-serif; }}
  h1 {{ font-size: 1.3rem; font-weight: 600; margin: 0; }}
  p {{ color: #5f6b7a; margin: .2rem 0 1.4rem; }}
  svg {{ width: 100%; height: auto; }}
  .tables {{ display: flex; flex-wrap: wrap; gap: 1rem 3rem; margin-top: 1.4rem; align-items: flex-start; }}
  table {{ border-collapse: collapse; font-size: .9rem; }}
  th, td {{ padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #e3e8ee; text-align: left; }}
  th {{ color: #5f6b7a; font-weight: 400; }}
  .numbers td, .numbers th + th {{ text-align: right; font-variant-numeric: tabular-nums; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{subtitle}</p>
<figure style="margin: 0" role="img" aria-label="{label}">
{svg}
</figure>
<div class="tables">
{tables}
</div>
</body>
</html>
"""


Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""A head, empty for none, and rows."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A drawing at a row (0 or 1) and at some of the six columns of a sheet."""

    row: int
    columns: slice
    title: str
    draw: Callable[[Axes], None]


@dataclass(frozen=True, slots=True)
class Sheet:
    """What is drawn. `label` says what the picture shows to who cannot see it; `tables` are on pages only."""

    title: str
    subtitle: str
    label: str
    panels: Sequence[Panel]
    tables: Sequence[Table]


def write(path: Path, sheet: Sheet) -> None:
    """Draw into FILE.png or FILE.html. Raises ConfigError where it cannot be written."""
    data = _png(sheet) if path.suffix == ".png" else _page(sheet).encode()
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def _png(sheet: Sheet) -> bytes:
    with mpl.rc_context(STYLE):
        figure, out = _figure(sheet, heading=True), io.BytesIO()
        figure.savefig(out, format="png", dpi=DPI, metadata={"Software": None})
    return out.getvalue()


def _page(sheet: Sheet) -> str:
    with mpl.rc_context(STYLE):
        figure, out = _figure(sheet, heading=False), io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    return PAGE.format(
        title=html.escape(sheet.title),
        subtitle=html.escape(sheet.subtitle),
        label=html.escape(sheet.label),
        svg=svg[svg.index("<svg") :],
        tables="".join(_table(rows, head) for head, rows in sheet.tables),
    )


def _table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    def line(cells: Sequence[str], kinds: Sequence[str]) -> str:
        parts = (f"<{kind}>{html.escape(cell)}</{kind}>" for cell, kind in zip(cells, kinds, strict=True))
        return f"<tr>{''.join(parts)}</tr>\n"

    lines = [line(head, ["th"] * len(head))] if head else []
    lines += [line(row, ["th", *["td"] * (len(row) - 1)]) for row in rows]
    return f'<table class="{"numbers" if head else "figures"}">\n{"".join(lines)}</table>\n'


def _figure(sheet: Sheet, *, heading: bool) -> Figure:
    figure = Figure(figsize=SIZE if heading else (SIZE[0], SIZE[1] - HEADING), facecolor="white")
    if heading:
        top = 1 - HEADING / SIZE[1]
        figure.text(LEFT, top + 0.62 * (1 - top), sheet.title, fontsize=14, fontweight="bold", va="center")
        figure.text(LEFT, top + 0.24 * (1 - top), sheet.subtitle, fontsize=10, color=DIM, va="center")
    else:
        top = 1.0
    grid = figure.add_gridspec(2, 6, left=LEFT, right=0.975, top=top - 0.05, bottom=0.07, hspace=0.42, wspace=0.85)
    for panel in sheet.panels:
        axes = figure.add_subplot(grid[panel.row, panel.columns])
        axes.set_title(panel.title, loc="left", fontsize=10.5, fontweight="bold", color=INK, pad=10)
        panel.draw(axes)
    return figure


def draw_cdf(axes: Axes, values: Distribution, target: float, colour: str) -> None:
    """The share of values up to each, with percentiles, the target, and the share that keeps it."""
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if not values.curve:
        return
    (least, _), (greatest, _) = values.curve[0], values.curve[-1]
    if greatest > WIDE * values.percentiles[0]:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlim(least / 1.3, 1.3 * max(greatest, target))
    else:
        axes.set_xlim(0, 1.12 * max(greatest, target))
        axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: say(value)))
    x, y = zip(*values.curve, strict=True)
    axes.step(x, y, where="post", color=colour, linewidth=2)
    axes.axvline(target, color=RED, linewidth=1.2, linestyle=(0, (4, 3)))
    _note(axes, f"{values.within:.1%} within\n{say(target)}", (target, 0.08), RED, down=0, turn=0.5)
    for share, value in zip(PERCENTILES, values.percentiles, strict=True):
        axes.plot([value], [share], "o", color=colour, markersize=5, markeredgecolor="white", markeredgewidth=0.8)
        _note(axes, f"p{100 * share:g}  {say(value)}", (value, share), DIM, down=8, turn=0.72)


def _note(axes: Axes, text: str, point: tuple[float, float], colour: str, *, down: float, turn: float) -> None:
    """A text to the right of a point and `down` pixels below it; from a share `turn` of the width on to its left, and
    half as much above it. There a curve that rises leaves room."""
    left = axes.transAxes.inverted().transform(axes.transData.transform(point))[0] > turn
    axes.annotate(
        text,
        point,
        xytext=(-7, down / 2) if left else (7, -down),
        textcoords="offset points",
        ha="right" if left else "left",
        va="center",
        color=colour,
        fontsize=8.5,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.8},
    )


def say(seconds: float) -> str:
    """As an axis has it: "250 ms", "4 s"."""
    return f"{seconds:.3g} s" if seconds >= 1 or not seconds else f"{1e3 * seconds:.3g} ms"
